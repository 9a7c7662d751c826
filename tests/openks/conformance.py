"""What OpenKS's document says about distributed training: names, parameters, defaults. A table, no code.

A name is a dotted path from `plait.openks`. Its parameters are those of the document, in its order, each with its
default, or REQUIRED. Where the document writes `def init(self, ...)` for a constructor, the class stands here.
"""

from __future__ import annotations

REQUIRED = "a value must be given"

BACKWARD = {
    "loss": REQUIRED,
    "startup_program": None,
    "parameter_list": None,
    "no_grad_set": None,
    "callbacks": None,
}
MINIMIZE = {"loss": REQUIRED, "startup_program": None, "parameter_list": None, "no_grad_set": None}
SAVE_INFERENCE_MODEL = {
    "executor": REQUIRED,
    "dirname": REQUIRED,
    "feeded_var_names": REQUIRED,
    "target_vars": REQUIRED,
    "main_program": None,
    "export_for_deployment": True,
}
SAVE_PERSISTABLES = {"executor": REQUIRED, "dirname": REQUIRED, "main_program": None}
PROGRAMS = {"startup_program": REQUIRED, "main_program": REQUIRED}

SIGNATURES = {
    # role makers
    "RoleMakerBase": {},
    "RoleMakerBase.is_worker": {},
    "RoleMakerBase.is_server": {},
    "RoleMakerBase.is_first_worker": {},
    "RoleMakerBase.worker_num": {},
    "RoleMakerBase.worker_index": {},
    "RoleMakerBase.server_index": {},
    "RoleMakerBase.get_trainer_endpoints": {},
    "RoleMakerBase.to_string": {},
    "RoleMakerBase.all_gather": {"input": REQUIRED},
    "RoleMakerBase.all_reduce_worker": {"input": REQUIRED, "output": REQUIRED, "mode": "sum"},
    "RoleMakerBase.barrier_worker": {},
    "RoleMakerBase.barrier_all": {},
    "PaddleCloudRoleMaker": {"is_collective": False},
    "PaddleCloudRoleMaker.generate_role": {},
    # algorithms
    "KSDistributedFactory": {},
    "KSDistributedFactory.instantiation": {"flag": REQUIRED},
    "BaseDistributedAlgorithm": {"mode": REQUIRED},
    "BaseDistributedAlgorithm.is_first_worker": {},
    "BaseDistributedAlgorithm._is_worker": {},
    "BaseDistributedAlgorithm.worker_num": {},
    "BaseDistributedAlgorithm.worker_endpoints": {"to_string": False},
    "BaseDistributedAlgorithm.is_server": {},
    "BaseDistributedAlgorithm.split_files": {"files": REQUIRED},
    "BaseDistributedAlgorithm.init": {"role_maker": None},
    "BaseDistributedAlgorithm.all_reduce_worker": {"input": REQUIRED, "output": REQUIRED},
    "BaseDistributedAlgorithm.barrier_workers": {},
    "CPUDistributedAlgorithm": {},
    "CPUDistributedAlgorithm.init_worker": {},
    "CPUDistributedAlgorithm.init_server": {"model_dir": None},
    "CPUDistributedAlgorithm.run_server": {},
    "CPUDistributedAlgorithm.stop_worker": {},
    "CPUDistributedAlgorithm.distributed_optimizer": {"optimizer": REQUIRED, "strategy": None},
    "CPUDistributedAlgorithm.save_inference_model": SAVE_INFERENCE_MODEL,
    "CPUDistributedAlgorithm.save_persistables": SAVE_PERSISTABLES,
    "GPUDistributedAlgorithm": {},
    "GPUDistributedAlgorithm.distributed_optimizer": {"optimizer": REQUIRED, "strategy": None},
    "GPUDistributedAlgorithm.save_inference_model": SAVE_INFERENCE_MODEL,
    "GPUDistributedAlgorithm.save_persistables": SAVE_PERSISTABLES,
    # optimizers
    "BaseDistributedOptimizer": {"optimizer": REQUIRED, "strategy": None},
    "BaseDistributedOptimizer.minimize": MINIMIZE,
    "GeneralDistributedOptimizer": {"optimizer": REQUIRED, "strategy": None},
    "GeneralDistributedOptimizer.backward": BACKWARD,
    "GeneralDistributedOptimizer.apply_gradients": {"params_grads": REQUIRED},
    "GeneralDistributedOptimizer.minimize": MINIMIZE,
    "HeterogeneousDistributedOptimizer": {"optimizer": REQUIRED, "strategy": None},
    "HeterogeneousDistributedOptimizer.backward": BACKWARD,
    "HeterogeneousDistributedOptimizer.apply_gradients": {"params_grads": REQUIRED},
    "HeterogeneousDistributedOptimizer.minimize": MINIMIZE,
    "HeterogeneousDistributedOptimizer._try_to_compile": PROGRAMS,
    "HeterogeneousDistributedOptimizer._transpile": PROGRAMS,
    # few-shot classes
    "Open_KS_ImageNet.sample": {"num_images": REQUIRED},
    "Open_KS_ImageNet._read_image": {"name": REQUIRED},
    "Open_KS_Character.sample": {"num_images": REQUIRED},
    "Open_KS_Character._read_image": {"name": REQUIRED},
    "Open_KS_read": {},
    "Open_KS_read.read_dataset": {"data_dir": REQUIRED},
    "Open_KS_read._read_classes": {"dir_path": REQUIRED},
}

BASES = {
    "PaddleCloudRoleMaker": "RoleMakerBase",
    "CPUDistributedAlgorithm": "BaseDistributedAlgorithm",
    "GPUDistributedAlgorithm": "BaseDistributedAlgorithm",
    "GeneralDistributedOptimizer": "BaseDistributedOptimizer",
    "HeterogeneousDistributedOptimizer": "BaseDistributedOptimizer",
}
