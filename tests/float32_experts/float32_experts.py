"""An SGLang plugin for float32 tests on a CUDA GPU; found through the metadata beside it once this folder is on the path.

``SGLANG_FORCE_FUSED_OP_BACKEND=torch`` forces experts onto SGLang's torch code, too, which a CUDA graph cannot capture
and which has another weight layout than gpt-oss. Their Triton kernel knows float32, but its caller asks it to round
results to float16 unless they are bfloat16 (see patches/0006), which is enough to turn a near tie of the router.
"""

from types import SimpleNamespace


def activate() -> None:
    import triton.language as tl
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    UnquantizedFusedMoEMethod.forward_native = UnquantizedFusedMoEMethod.forward_cuda
    fused_moe.tl = SimpleNamespace(bfloat16=tl.bfloat16, float16=tl.float32)
