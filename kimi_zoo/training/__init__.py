"""Fine-tuning: text to packed rows, rows to a loss, a loss to an optax step; and a run that survives being stopped.

Every piece can be used by itself: `train_step` is one way to put some of them together, `finetune` another.
"""

from kimi_zoo.training.dataset import Dataset as Dataset
from kimi_zoo.training.dataset import prepare as prepare
from kimi_zoo.training.dataset import split as split
from kimi_zoo.training.evaluation import evaluate as evaluate
from kimi_zoo.training.examples import DataError as DataError
from kimi_zoo.training.lora import add_lora as add_lora
from kimi_zoo.training.lora import load_adapter as load_adapter
from kimi_zoo.training.lora import lora_leaves as lora_leaves
from kimi_zoo.training.lora import merge_lora as merge_lora
from kimi_zoo.training.lora import save_adapter as save_adapter
from kimi_zoo.training.loss import batch_sums as batch_sums
from kimi_zoo.training.loss import token_losses as token_losses
from kimi_zoo.training.optimizers import learning_rate as learning_rate
from kimi_zoo.training.optimizers import make_optimizer as make_optimizer
from kimi_zoo.training.options import RunOptions as RunOptions
from kimi_zoo.training.packing import Batch as Batch
from kimi_zoo.training.packing import Batches as Batches
from kimi_zoo.training.run import NonFiniteError as NonFiniteError
from kimi_zoo.training.run import finetune as finetune
from kimi_zoo.training.run import fuse as fuse
from kimi_zoo.training.step import StepOptions as StepOptions
from kimi_zoo.training.step import TrainState as TrainState
from kimi_zoo.training.step import as_computed as as_computed
from kimi_zoo.training.step import gradients as gradients
from kimi_zoo.training.step import joined as joined
from kimi_zoo.training.step import start as start
from kimi_zoo.training.step import train_step as train_step
from kimi_zoo.training.trainable import decays as decays
from kimi_zoo.training.trainable import select as select
from kimi_zoo.training.trainable import trains as trains
