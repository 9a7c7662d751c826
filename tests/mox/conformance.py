"""What the document of the door `plait.mox` says: names, parameters, defaults. A table, no code.

A name is a dotted path from `plait.mox`. Its parameters are those of the document, in its order, each with its default:
REQUIRED where there is none, SENTINEL where the document shows `<object object>`, UNSAID where an example uses a
parameter and nothing says what happens when it is left out.
"""

from __future__ import annotations

REQUIRED = "a value must be given"
SENTINEL = "an object that nobody can pass by chance"
UNSAID = "the document does not say"

SIGNATURES = {
    # 1. flags
    "get_flag": {"name": REQUIRED},
    "set_flag": {"name": REQUIRED, "value": REQUIRED},
    "ModeKeys": {},
    # 2. input data
    "ImageClassificationRawMetadata": {"base_dir": REQUIRED, "redirect_dir": None, "labels_filename": "labels.txt"},
    "ImageClassificationRawDataset": {
        "metadata": REQUIRED,
        "batch_size": None,
        "num_readers": 8,
        "num_epochs": None,
        "shuffle": True,
        "shuffle_buffer_size": 16,
        "capacity": 256,
        "cache_dir": None,
        "preprocess_fn": None,
        "preprocess_threads": 12,
        "image_size": None,
        "remove_cache_on_finish": True,
        "private_num_threads": 0,
        "reader_class": None,
        "reader_kwargs": None,
        "drop_remainder": False,
        "augmentation_fn": None,
        "label_one_hot": False,
    },
    "ImageClassificationTFRecordMetadata": {
        "base_dir": REQUIRED,
        "file_pattern": REQUIRED,
        "num_samples": None,
        "redirect_dir": None,
        "num_classes": 0,
        "label_map_file": "labels.txt",
    },
    "ImageClassificationTFRecordDataset": {
        "metadata": REQUIRED,
        "batch_size": None,
        "shuffle": True,
        "shuffle_buffer_size": 6400,
        "num_parallel": 8,
        "num_epochs": None,
        "cache_dir": None,
        "preprocess_fn": None,
        "image_size": None,
        "remove_cache_on_finish": True,
        "private_num_threads": 0,
        "custom_feature_keys": None,
        "custom_feature_values": None,
        "drop_remainder": False,
        "augmentation_fn": None,
        "label_one_hot": False,
    },
    "MultilabelClassificationRawMetadata": {
        "base_dir": REQUIRED,
        "images_sub_dir": "images",
        "labels_sub_dir": "labels",
        "labels_extension": "txt",
        "redirect_dir": None,
        "labels_filename": "labels.txt",
    },
    "MultilabelClassificationRawDataset": {
        "metadata": REQUIRED,
        "batch_size": None,
        "num_readers": 8,
        "num_epochs": None,
        "shuffle": True,
        "shuffle_buffer_size": 16,
        "capacity": 256,
        "cache_dir": None,
        "preprocess_fn": None,
        "preprocess_threads": 12,
        "image_size": None,
        "remove_cache_on_finish": True,
        "private_num_threads": 0,
        "reader_class": None,
        "reader_kwargs": None,
        "drop_remainder": False,
        "label_sep": "\n",
        "skip_label_not_found": False,
        "augmentation_fn": None,
    },
    "get_data_augmentation_fn": {
        "name": REQUIRED,
        "run_mode": REQUIRED,
        "output_height": None,
        "output_width": None,
    },
    "get_dataset": {"name": REQUIRED, "split_name": REQUIRED, "dataset_dir": REQUIRED, "capacity": UNSAID},
    "get_dataset_meta": {"name": REQUIRED},
    # 3. models
    "get_model_fn": {
        "name": REQUIRED,
        "run_mode": REQUIRED,
        "num_classes": REQUIRED,
        "weight_decay": 0.0,
        "data_format": "NHWC",
        "batch_norm_fused": False,
        "batch_renorm": False,
        "image_height": None,
        "image_width": None,
        "preprocess_fn": UNSAID,
    },
    "get_model_meta": {"name": REQUIRED},
    # 4. the model_fn's result
    "ModelSpec": {
        "loss": None,
        "var_scopes": None,
        "log_info": None,
        "output_info": None,
        "export_spec": None,
        "hooks": None,
    },
    "ExportSpec": {"inputs_dict": REQUIRED, "outputs_dict": REQUIRED, "version": -1},
    "get_collection": {"key": REQUIRED},
    "var_scope": {"force_dtype": None},
    "AggregativeSessionRunHook": {},
    "AggregativeSessionRunHook.before_run": {"run_context": REQUIRED},
    "AggregativeSessionRunHook.support_aggregation": {},
    "AggregativeSessionRunHook.support_sync_workers": {},
    "AggregativeSessionRunHook.run_inter_mode": {},
    "file.File": {"url": REQUIRED, "mode": UNSAID},
    # 5. optimizers
    "get_optimizer_fn": {"name": REQUIRED, "learning_rate": REQUIRED, "scope": None},
    "learning_rate_scheduler.piecewise_lr": {
        "lr_strategy": REQUIRED,
        "num_samples": REQUIRED,
        "global_batch_size": REQUIRED,
    },
    # 6. running
    "run": {
        "input_fn": None,
        "output_fn": None,
        "model_fn": None,
        "optimizer_fn": None,
        "run_mode": "invalid",
        "inter_mode": None,
        "batch_size": None,
        "auto_batch": True,
        "log_dir": None,
        "max_number_of_steps": 0,
        "checkpoint_path": None,
        "log_every_n_steps": 10,
        "output_every_n_steps": 0,
        "save_summary_steps": 100,
        "save_model_secs": SENTINEL,
        "export_model": False,
        "fetch_strategy_fn": None,
        "save_model_steps": SENTINEL,
    },
    "EarlyStoppingHook": {
        "monitor_info": REQUIRED,
        "monitor": REQUIRED,
        "batch_size": REQUIRED,
        "samples_in_train": REQUIRED,
        "samples_in_eval": REQUIRED,
        "evaluate_every_n_epochs": UNSAID,
        "min_delta": UNSAID,
        "patience": UNSAID,
        "prefix": UNSAID,
    },
}

SAMPLES = {
    "ImageClassificationTFRecordMetadata": ["file_patterns"],
    "ImageClassificationTFRecordDataset": ["meta"],
    "get_flag": ["flag_name"],
    "ModelSpec": ["output_dict", "var_scope"],
    "placeholder": ["dtype", "shape"],
}
"""What the document's prose and samples write by name beside its headings: second spellings, or TensorFlow's own."""

VARIADIC = ["get_optimizer_fn"]
"""What takes `*args, **kwargs` for somebody else."""

ALONE = ["run"]
"""What has the documented parameters and no other."""

CONSTANTS = {
    "ModeKeys.EVAL": "EVAL",
    "ModeKeys.EXPORT": "EXPORT",
    "ModeKeys.PREDICT": "PREDICT",
    "ModeKeys.TRAIN": "TRAIN",
    "ExportKeys.TF_SERVING": UNSAID,
    "GraphKeys.GLOBAL_VARIABLES": UNSAID,
    "GraphKeys.REGULARIZATION_LOSSES": UNSAID,
}

OPTIMIZERS = {
    "adadelta": {},
    "adagrad": {},
    "adam": {},
    "ftrl": {},
    "momentum": {"momentum": 0.9},
    "rmsprop": {},
    "sgd": {},
}
"""With what they cannot do without."""

FLAGS = ["checkpoint_exclude_patterns", "worker_hosts"]
"""Those that the document names; it calls for all flags of MoXing, and lists none."""

MODES_OF_RUN = ["TRAIN", "EVAL", "PREDICT"]

DEVIATIONS: dict[tuple[str, str], str] = {
    ("ImageClassificationTFRecordDataset", "metadata"): "may be left out, since a sample writes meta= instead",
    (
        "ImageClassificationTFRecordMetadata",
        "file_pattern",
    ): "may be left out: the samples write file_patterns= instead",
    ("get_flag", "name"): "may be left out, since the document's own sample writes flag_name= instead",
}
"""Parameters whose default is another one here, and why."""

NETWORKS = [
    "ALEXNET_V2",
    "CIFARNET",
    "OVERFEAT",
    "VGG_A",
    "VGG_16",
    "VGG_19",
    "VGG_A_BN",
    "VGG_16_BN",
    "VGG_19_BN",
    "INCEPTION_V1",
    "INCEPTION_V2",
    "INCEPTION_V3",
    "INCEPTION_V4",
    "INCEPTION_RESNET_V2",
    "LENET",
    "RESNET_V1_18",
    "RESNET_V1_50",
    "RESNET_V1_50_8K",
    "RESNET_V1_101",
    "RESNET_V1_152",
    "RESNET_V1_200",
    "RESNET_V2_50",
    "RESNET_V2_101",
    "RESNET_V2_152",
    "RESNET_V2_200",
    "RESNEXT_B_50",
    "RESNEXT_B_101",
    "RESNEXT_C_50",
    "RESNEXT_C_101",
    "PVANET",
    "MOBILENET_V1",
    "MOBILENET_V1_075",
    "MOBILENET_V1_050",
    "MOBILENET_V1_025",
    "MOBILENET_V2",
    "MOBILENET_V2_140",
    "MOBILENET_V2_035",
    "RESNET_V1_20",
    "RESNET_V1_110",
    "NASNET_CIFAR",
    "NASNET_MOBILE",
    "NASNET_LARGE",
    "PNASNET_LARGE",
    "PNASNET_MOBILE",
]
"""`NetworkKeys`, in order; each is its own name in small letters."""

PREPROCESSING = {
    "vgg_preprocessing": [
        "ALEXNET_V2",
        "OVERFEAT",
        "RESNET_V1_18",
        "RESNET_V1_50",
        "RESNET_V1_50_8K",
        "RESNET_V1_101",
        "RESNET_V1_152",
        "RESNET_V1_200",
        "RESNET_V2_50",
        "RESNET_V2_101",
        "RESNET_V2_152",
        "RESNET_V2_200",
        "RESNEXT_B_50",
        "RESNEXT_B_101",
        "RESNEXT_C_50",
        "RESNEXT_C_101",
        "VGG",
        "VGG_A",
        "VGG_16",
        "VGG_19",
        "VGG_A_BN",
        "VGG_16_BN",
        "VGG_19_BN",
    ],
    "cifarnet_preprocessing": ["CIFARNET", "RESNET_V1_20", "NASNET_CIFAR", "RESNET_V1_110"],
    "inception_preprocessing": [
        "INCEPTION",
        "INCEPTION_V1",
        "INCEPTION_V2",
        "INCEPTION_V3",
        "INCEPTION_V4",
        "INCEPTION_RESNET_V2",
        "MOBILENET_V1",
        "MOBILENET_V2",
        "MOBILENET_V2_140",
        "MOBILENET_V2_035",
        "NASNET_MOBILE",
        "NASNET_LARGE",
        "PNASNET_LARGE",
        "PNASNET_MOBILE",
    ],
    "lenet_preprocessing": ["LENET"],
    "pvanet_preprocessing": ["PVANET"],
}  # fmt: skip
"""`PreprocessingKeys`, by recipe."""
