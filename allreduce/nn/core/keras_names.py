"""Arguments of Keras's methods and layers that do not exist here, and what does the same."""

from __future__ import annotations

from collections.abc import Mapping

_WORKERS = "batches are made ahead of the step by one thread; a DataLoader may use more"
_BATCHES = "an iterable of batches is passed as x"

OF_COMPILE: Mapping[str, str] = {
    "jit_compile": "steps are always traced and compiled; run_eagerly=True switches it off",
    "steps_per_execution": "a step costs no Python loop; leave it out",
    "auto_scale_loss": "bfloat16 has float32's range and needs no loss scale",
}
OF_FIT: Mapping[str, str] = {
    "workers": _WORKERS,
    "use_multiprocessing": _WORKERS,
    "max_queue_size": _WORKERS,
    "generator": _BATCHES,
    "nb_epoch": "it is called epochs",
}
_PENALTY = "add the penalty to the loss in a train_step of your own; AdamW has weight_decay="
_SHAPE = "begin the model with ar.nn.Input(shape)"
OF_LAYERS: Mapping[str, str] = {
    "activity_regularizer": _PENALTY,
    "batch_input_shape": _SHAPE,
    "bias_regularizer": _PENALTY,
    "data_format": "images are (batch, height, width, channels)",
    "embeddings_regularizer": _PENALTY,
    "input_dim": _SHAPE,
    "input_shape": _SHAPE,
    "kernel_constraint": "clip the variable between steps, in a callback",
    "kernel_regularizer": _PENALTY,
}
# Methods of layers and models.
METHODS: Mapping[str, str] = {
    "add_loss": _PENALTY,
    "add_weight": "add_variable(name, shape, initializer) makes a variable",
    "parameters": "trainable_variables lists what is trained",
    "state_dict": "save_weights writes a file, get_weights returns a list",
    "load_state_dict": "load_weights reads a file, set_weights takes a list",
}
_FILE = "the file is safetensors, and replaces one of that name"
OF_SAVE: Mapping[str, str] = {
    "filepath": "it is called path",
    "overwrite": _FILE,
    "save_format": _FILE,
    "include_optimizer": "the optimizer is saved with the model; save_weights leaves it out",
}
OF_LOAD: Mapping[str, str] = {
    "filepath": "it is called path",
    "compile": "a model that was compiled is loaded so; compile it again to change that",
    "safe_mode": "a file holds no code",
}
OF_LOSSES: Mapping[str, str] = {
    "reduction": "it gives one value per sample, and fit and minimize average over all samples; "
    "call its function in a step of your own for another reduction",
    "axis": "classes are on the last axis",
    "dtype": "it computes in the dtype of the predictions",
}
_COLUMN = "pass a function, or a Metric of your own, that takes this column of y_true and y_pred"
OF_METRICS: Mapping[str, str] = {
    "dtype": "states are summed in float64",
    "axis": "classes are on the last axis",
    "class_id": _COLUMN,
    "multi_label": f"it counts all columns together; {_COLUMN}",
    "num_labels": f"it counts all columns together; {_COLUMN}",
    "label_weights": f"it counts all columns together; {_COLUMN}",
    "num_classes": "it is the number of columns of y_pred",
    "summation_method": "it interpolates, as Keras does by default",
    "top_k": "TopKCategoricalAccuracy(k=…) counts the k likeliest classes",
}
