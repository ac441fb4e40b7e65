"""An SGLang plugin for float32 tests on a CUDA GPU; found through the metadata beside it once this folder is on the path.

``SGLANG_FORCE_FUSED_OP_BACKEND=torch`` forces experts onto SGLang's torch code, too, which a CUDA graph cannot capture
and which has another weight layout than gpt-oss. Their Triton kernel knows float32 and needs no replacement.
"""


def activate() -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    UnquantizedFusedMoEMethod.forward_native = UnquantizedFusedMoEMethod.forward_cuda
