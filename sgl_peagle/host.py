"""The host symbols this plugin relies on, and the check that SGLang still has them.

The check reads SGLang's source files instead of importing them: it costs no start-up time for servers that do
not use PEAGLE, and it cannot be disturbed by a module that fails to import on this machine. A new SGLang thus
fails with "expected X(a, b), found X(a, c)", not deep inside a forward pass.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from sgl_peagle.errors import PEagleError

#: Versions this release was written and tested against.
SUPPORTED_VERSIONS = ("0.5.23",)


@dataclass(frozen=True)
class HostSymbol:
    """One function, method or class of SGLang.

    Attributes:
        module: Dotted module below ``sglang.srt``, or below ``sglang`` if it begins with ``kernels.``.
        name: ``function``, ``Class`` or ``Class.method``.
        parameters: Names that must be parameters (of a function) or annotated fields (of a class).
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The module below ``sglang``."""
        return self.module if self.module.startswith("kernels.") else f"srt.{self.module}"


def _symbols(module: str, **names: str) -> list[HostSymbol]:
    return [HostSymbol(module, name, tuple(args.split())) for name, args in names.items()]


_WORKER = "speculative.eagle_worker_v2"
_INIT = "server_args gpu_id nccl_port target_worker"

_RUNNER = "speculative.eagle_draft_extend_cuda_graph_runner"


def _host_graph_symbols() -> list[HostSymbol]:
    """What :mod:`sgl_peagle.graph` subclasses and calls."""
    return [
        HostSymbol(_RUNNER, "EAGLEDraftExtendCudaGraphRunner.__init__", ("eagle_worker",)),
        HostSymbol(_RUNNER, "EAGLEDraftExtendCudaGraphRunner.can_run_graph", ("forward_batch",)),
        HostSymbol(_RUNNER, "EAGLEDraftExtendCudaGraphRunner.capture_one_shape", ("size", "forward")),
        HostSymbol(_RUNNER, "EAGLEDraftExtendCudaGraphRunner.execute", ("forward_batch", "select_index")),
        HostSymbol(_RUNNER, "EagleDraftExtendInputBuffers",
                   ("hidden_states", "select_index", "next_token_logits_buffer", "out_cache_loc", "seq_lens")),
        HostSymbol("model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner.capture"),
        HostSymbol("model_executor.graph_shared_output", "GraphSharedOutput.get_logits_buffer", ("vocab_size", "rows")),
        HostSymbol("model_executor.cuda_graph_config", "check_cuda_graph_backend", ("phase", "backend")),
        HostSymbol("layers.attention.triton_backend", "TritonAttnBackend.__init__", ("model_runner", "skip_prefill")),
        HostSymbol("layers.attention.triton_backend", "TritonAttnBackend.init_cuda_graph_state",
                   ("max_bs", "max_num_tokens", "kv_indices_buf", "cuda_graph_num_kv_splits_buf")),
        HostSymbol("layers.attention.triton_backend", "TritonAttnBackend._update_draft_extend_buffers",
                   ("plan", "bs", "seq_lens", "forward_mode", "spec_info", "req_pool_indices")),
        HostSymbol("layers.attention.triton_backend", "TritonAttnBackend._forward_extend_kernel", ("layer",)),
        HostSymbol("layers.attention.triton_backend", "TritonAttnBackend.forward_extend",
                   ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
        HostSymbol("layers.attention.triton_backend", "ForwardMetadata",
                   ("kv_indptr", "kv_indices", "qo_indptr", "max_extend_len", "custom_mask")),
        HostSymbol("kernels.ops.attention.extend_attention", "extend_attention_fwd",
                   ("q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr", "kv_indptr",
                    "kv_indices", "custom_mask", "is_causal", "mask_indptr", "max_len_extend", "k_scale", "v_scale",
                    "sm_scale", "logit_cap", "sliding_window_size", "sinks", "xai_temperature_len", "score_mod",
                    "aux_tensors", "extend_seq_lens_cpu")),
        HostSymbol("speculative.spec_utils", "resolve_num_tokens_per_req", ("phase",)),
        HostSymbol("speculative.spec_utils", "draft_pp_context"),
        HostSymbol("speculative.spec_utils", "draft_tp_context"),
        HostSymbol("runtime_context", "_ConfigBag.override"),
        HostSymbol("utils.common", "get_available_gpu_memory", ("device", "gpu_id")),
        HostSymbol("utils.common", "log_info_on_rank0", ("logger", "msg")),
        HostSymbol("environ", "Envs"),
        HostSymbol("layers.logits_processor", "LogitsProcessorOutput", ("next_token_logits", "hidden_states")),
    ]  # fmt: skip


def _cpu_platform_symbols() -> list[HostSymbol]:
    """What :mod:`sgl_peagle.cpu` subclasses, calls and changes."""
    native = "layers.attention.torch_native_backend"
    updater = "managers.scheduler_components.weight_updater"
    return [
        HostSymbol(native, "TorchNativeAttnBackend.__init__", ("model_runner",)),
        HostSymbol(native, "TorchNativeAttnBackend.init_forward_metadata", ("forward_batch",)),
        *_symbols("layers.radix_attention", AttentionType="", RadixAttention=""),
        *_symbols("mem_cache.memory_pool", KVWriteLoc=""),
        *_symbols("layers.attention.attention_registry", register_attention_backend="name"),
        HostSymbol("speculative.draft_utils", "DraftBackendFactory._create_backend",
                   ("backend_name", "backend_map", "error_template", "stamps_children")),
        *_symbols("managers.overlap_utils", gather_spec_extras=""),
        HostSymbol("layers.quantization.unquant", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
        HostSymbol("layers.logits_processor", "LogitsProcessor._compute_lm_head", ("lm_head", "embedding_bias")),
        *(HostSymbol(updater, f"SchedulerWeightUpdaterManager.{name}")
          for name in ("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
                       "update_weights_from_ipc", "resume_memory_occupation", "check_weights")),
    ]  # fmt: skip


def _model_symbols() -> list[HostSymbol]:
    """What :mod:`sgl_peagle.model` is built of."""
    linear, vocabulary = "layers.linear", "layers.vocab_parallel_embedding"
    return [
        HostSymbol("configs.draft_parallel", "DraftTPExecution"),
        HostSymbol("layers.layernorm", "RMSNorm.__init__", ("hidden_size", "eps")),
        HostSymbol(linear, "QKVParallelLinear.__init__",
                   ("hidden_size", "head_size", "total_num_heads", "total_num_kv_heads", "bias", "quant_config", "prefix")),
        HostSymbol(vocabulary, "VocabParallelEmbedding.__init__", ("num_embeddings", "embedding_dim", "prefix")),
        HostSymbol(vocabulary, "ParallelLMHead.__init__", ("num_embeddings", "embedding_dim", "quant_config", "prefix")),
        HostSymbol("layers.logits_processor", "LogitsProcessor.__init__", ("config",)),
        *_symbols("model_loader.weight_utils", default_weight_loader="param loaded_weight"),
        *_symbols("utils.common", add_prefix="name prefix"),
    ]  # fmt: skip


HOST_SYMBOLS: tuple[HostSymbol, ...] = tuple(
    [
        *_model_symbols(),
        *_cpu_platform_symbols(),
        *_symbols("model_executor.forward_batch_info", CaptureHiddenMode="", ForwardMode=""),
        *_symbols("model_executor.cuda_graph_config", Backend="", Phase=""),
        *_symbols("environ", envs=""),
        *_symbols("speculative.spec_utils", get_plan_stream="device"),
        *_symbols("speculative.spec_registry", get_spec=""),
        *_symbols("arg_groups.model_override_base", model_config_of=""),
        *_symbols("configs.model_config", AttentionArch=""),
        *_symbols("plugins.hook_registry", HookType=""),
        *_symbols("entrypoints.engine", Engine=""),
        *_symbols("plugins", load_plugins=""),
        HostSymbol("speculative.spec_info", "SpeculativeAlgorithm.register",
                   ("name", "supports_overlap", "validate_server_args", "spec_class")),
        HostSymbol("speculative.spec_registry", "CustomSpecAlgo.__init__",
                   ("name", "factory", "supports_overlap", "validate_server_args")),
        HostSymbol("speculative.spec_registry", "CustomSpecAlgo.resolve_max_speculative_num_draft_tokens",
                   ("server_args",)),
        HostSymbol("speculative.spec_registry", "CustomSpecAlgo.get_num_tokens_per_req_for_target_verify",
                   ("num_draft_tokens", "is_draft_worker")),
        HostSymbol("speculative.spec_registry", "CustomSpecAlgo.handle_server_args", ("server_args",)),
        HostSymbol("speculative.spec_registry", "CustomSpecAlgo.create_worker", ("server_args",)),
        HostSymbol("managers.overlap_utils", "FutureMap.__init__",
                   ("device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay")),
        HostSymbol("managers.overlap_utils", "RelayPayload", ("bonus_tokens", "topk_p", "topk_index", "hidden_states")),
        *_symbols("mem_cache.allocation_sizing", get_alloc_len_per_decode="", get_alloc_reserve_per_decode="",
                  get_req_to_token_extra_context_len=""),
        *_symbols("runtime_context", max_speculative_num_draft_tokens="", get_spec="", get_device="",
                  get_schedule="", get_parallel="", max_prefill_buffer_tokens=""),
        *_symbols("arg_groups.model_override_base", resolving_view="server_args", record_of="view",
                  attention_backends_of="cfg"),
        HostSymbol("utils.hf_transformers.config", "HfModelConfigParser.parse",
                   ("model", "trust_remote_code", "revision")),
        HostSymbol("plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
        *_symbols("configs.model_config", register_model_config_factory="server_args_type factory"),
        HostSymbol("configs.model_config", "ModelConfig.from_server_args",
                   ("server_args", "model_path", "model_revision", "is_draft_model", "context_length")),
        HostSymbol("speculative.base_spec_worker", "BaseSpecWorker.alloc_memory_pool",
                   ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator")),
        HostSymbol("speculative.base_spec_worker", "BaseSpecWorker.init_attention_backends"),
        HostSymbol("speculative.base_spec_worker", "BaseSpecWorker.weight_update_runners"),
        HostSymbol("configs.hybrid_arch", "mambaish_config", ("model_config",)),
        HostSymbol("speculative.base_spec_worker", "BaseSpecWorker.on_verify_complete_cpu",
                   ("num_correct_drafts_per_req", "batch_size")),
        HostSymbol("speculative.base_spec_worker", "EagleDraftWorkerBase._rebuild_topk1_chain_buffers"),
        HostSymbol(_WORKER, "EAGLEWorkerV2.__init__", tuple(_INIT.split())),
        HostSymbol(_WORKER, "EAGLEWorkerV2.forward_batch_generation",
                   ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors")),
        HostSymbol(_WORKER, "EAGLEWorkerV2._forward_prefill_batch", ("batch", "on_publish")),
        HostSymbol(_WORKER, "EagleDraftWorker.__init__", tuple(_INIT.split())),
        HostSymbol(_WORKER, "EagleDraftWorker.alloc_memory_pool",
                   ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator")),
        HostSymbol(_WORKER, "EagleDraftWorker.init_lm_head"),
        HostSymbol(_WORKER, "EagleDraftWorker.init_token_map"),
        HostSymbol(_WORKER, "EagleDraftWorker.init_attention_backend"),
        HostSymbol(_WORKER, "EagleDraftWorker.init_cuda_graphs"),
        HostSymbol(_WORKER, "EagleDraftWorker._capture_cuda_graphs"),
        HostSymbol(_WORKER, "EagleDraftWorker._resolve_shared_embed_and_head"),
        HostSymbol(_WORKER, "EagleDraftWorker.draft", ("batch", "with_topology")),
        HostSymbol(_WORKER, "EagleDraftWorker._draft_extend_for_prefill",
                   ("batch", "target_hidden_states", "next_token_ids", "mm_input_embeds", "kv_loc_plan")),
        HostSymbol(_WORKER, "EagleDraftWorker._draft_extend_for_decode", ("batch", "batch_result", "kv_loc_plan")),
        *_symbols("speculative.eagle_worker_common",
                  build_eagle_verify_input="batch draft_input parent_list top_scores_index draft_tokens draft_probs "
                  "target_worker topk num_steps num_draft_tokens tree_mask_mode device",
                  prepare_for_draft_extend="draft_extend_input batch predict num_draft_tokens draft_model_runner "
                  "cuda_graph_runner return_hidden_states_before_norm kv_loc_plan",
                  run_eagle_verify="batch topk num_draft_tokens grammar_barrier"),
        HostSymbol("speculative.eagle_info", "EagleDraftInput",
                   ("topk_p", "topk_index", "hidden_states", "bonus_tokens")),
        HostSymbol("speculative.eagle_info", "EagleDraftExtendInput",
                   ("hidden_states", "num_correct_drafts", "num_accept_tokens", "num_tokens_per_req",
                    "num_tokens_for_logprob_per_req", "select_index")),
        HostSymbol("managers.utils", "GenerationBatchResult",
                   ("logits_output", "next_token_ids", "accept_lens", "new_seq_lens", "next_draft_input")),
        *_symbols("speculative.eagle_utils", _eagle_prefill_tail_tokens="batch next_token_ids",
                  get_draft_input_from_target_hidden_dim="model_runner"),
        HostSymbol("speculative.draft_utils", "DraftBackendFactory.__init__",
                   ("draft_model_runner", "topk", "speculative_num_steps")),
        HostSymbol("speculative.draft_utils", "DraftBackendFactory.create_draft_extend_backend"),
        HostSymbol("speculative.draft_utils", "DraftBackendFactory._create_triton_prefill_backend"),
        *_host_graph_symbols(),
        HostSymbol("model_executor.forward_batch_info", "ForwardBatch.init_new",
                   ("batch", "model_runner", "capture_hidden_mode", "return_hidden_states_before_norm", "kv_loc_plan")),
        HostSymbol("layers.logits_processor", "LogitsMetadata.from_forward_batch", ("forward_batch",)),
        HostSymbol("layers.logits_processor", "LogitsMetadata",
                   ("draft_extend_select_index", "next_token_logits_buffer", "capture_hidden_mode")),
        HostSymbol("models.llama", "LlamaAttention.__init__",
                   ("config", "hidden_size", "num_heads", "num_kv_heads", "layer_id", "rope_theta", "rope_scaling",
                    "max_position_embeddings", "quant_config", "prefix", "bias")),
        HostSymbol("models.llama", "LlamaAttention.forward_prepare_native", ("positions", "hidden_states")),
        HostSymbol("models.llama", "LlamaMLP.__init__",
                   ("hidden_size", "intermediate_size", "hidden_act", "quant_config", "prefix")),
        HostSymbol("models.registry", "_ModelRegistry.resolve_model_cls", ("architectures",)),
        *_symbols("models.registry", ModelRegistry=""),
        *_symbols("server_args", ServerArgs=""),
        HostSymbol("configs.draft_parallel", "DraftParallelSpec", ("tp_execution",)),
        HostSymbol("model_executor.model_runner_components.spec_aux_hidden_state",
                   "resolve_spec_aux_hidden_state_config", ("server_args", "model_config", "spec_algorithm")),
    ]
)  # fmt: skip


def sglang_version() -> str:
    """The installed SGLang version, or ``not installed``."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=1)
def host_mismatches() -> tuple[str, ...]:
    """One line for every symbol that is missing or lacks a parameter (source files only, nothing imported)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return ("sglang is not installed",)
    root = Path(next(iter(spec.submodule_search_locations)))
    trees: dict[str, ast.Module | None] = {}
    problems = []
    for symbol in HOST_SYMBOLS:
        if symbol.module not in trees:
            trees[symbol.module] = _parse(root, symbol.path)
        tree = trees[symbol.module]
        problem = "module not found" if tree is None else _mismatch(tree, symbol)
        if problem:
            problems.append(f"sglang.{symbol.path}: {problem}")
    return tuple(problems)


def check_host() -> None:
    """Refuse an SGLang that this release was not written for.

    Raises:
        PEagleError: The version is not supported, or a symbol is missing or has other parameters.
    """
    version, supported = sglang_version(), ", ".join(SUPPORTED_VERSIONS)
    problems = host_mismatches()
    if version in SUPPORTED_VERSIONS and not problems:
        return
    detail = "; ".join(problems[:6]) or "all symbols look right, but this version was never tested"
    raise PEagleError(
        f"SGLang {version} with sgl-peagle {_own_version()} (supported: {supported})",
        detail,
        f"pip install sglang=={SUPPORTED_VERSIONS[-1]}, or a release of sgl-peagle made for SGLang {version}",
    )


def _own_version() -> str:
    from sgl_peagle import __version__

    return __version__


def _parse(root: Path, module: str) -> ast.Module | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _defined(node: ast.AST) -> list[str]:
    """Names that a statement defines: of a function, a class, variables or imports."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _mismatch(tree: ast.Module, symbol: HostSymbol) -> str | None:
    node: ast.AST | None = tree
    for part in symbol.name.split("."):
        node = next(
            (child for child in ast.iter_child_nodes(node) if part in _defined(child)),
            None,
        )
        if node is None:
            return f"expected {symbol.name}({', '.join(symbol.parameters)}), found nothing of that name"
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.ImportFrom)):
        found = []
    elif isinstance(node, ast.ClassDef):
        found = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    else:
        args = node.args
        found = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    if set(symbol.parameters) <= set(found):
        return None
    return f"expected {symbol.name}({', '.join(symbol.parameters)}), found {symbol.name}({', '.join(found)})"
