"""Pure functions of arrays: no modules, configs, caches or PRNG keys."""

from kimi_zoo.ops.kda import kda_implementation as kda_implementation
from kimi_zoo.ops.kda import kda_step as kda_step
from kimi_zoo.ops.kda import kimi_delta_attention as kimi_delta_attention
from kimi_zoo.ops.kda_gates import kda_gate as kda_gate
from kimi_zoo.ops.kda_gates import l2_norm as l2_norm
from kimi_zoo.ops.packing import segment_ids_from_cu_seqlens as segment_ids_from_cu_seqlens
from kimi_zoo.ops.packing import segment_positions as segment_positions
