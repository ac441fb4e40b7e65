"""SGLang's engine on the reference CPU platform gives transformers' tokens, without and with stock EAGLE-3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import import_sglang, in_fork

from sgl_peagle import cpu

pytestmark = pytest.mark.skipif(
    find_spec("sglang") is None or torch.accelerator.is_available(), reason="needs SGLang on a machine without a GPU"
)

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 24, 64, 4, 2, 16, 128
MAX_NEW_TOKENS = 24
DRAFT_LENGTH = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny random Llama with a tiny random EAGLE-3 head, prompts, and what transformers generates for them.

    The vocabulary is so small that a random head is sometimes right.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    cpu.early_setup()
    import_sglang()
    folder = tmp_path_factory.mktemp("models")
    return in_fork(lambda: _make_models(folder))


def _make_models(folder: Path) -> dict[str, Any]:
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=4, head_dim=HEAD_DIM,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512,
            initializer_range=0.2, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        )
    ).eval()
    target.save_pretrained(folder / "target")

    kv_width, q_width = KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
    matrices = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (q_width, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (kv_width, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (kv_width, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, q_width),
        "midlayer.mlp.gate_proj": (MLP, HIDDEN),
        "midlayer.mlp.up_proj": (MLP, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, MLP),
        "lm_head": (VOCAB, HIDDEN),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    head = {f"{name}.weight": torch.randn(shape) * 0.1 for name, shape in matrices.items()}
    head |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    head |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    config = {
        **json.loads((folder / "target/config.json").read_text()),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        # The default layers of a 4-layer target coincide.
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (folder / "eagle3").mkdir()
    save_file(head, folder / "eagle3/model.safetensors")
    (folder / "eagle3/config.json").write_text(json.dumps(config))

    prompts = [torch.randint(2, VOCAB, (n,)).tolist() for n in (5, 17, 33, 9)]
    prompts.append(prompts[0] * 4)
    generate = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = [target.generate(torch.tensor([p]), **generate)[0, len(p) :].tolist() for p in prompts]
    return {"target": folder / "target", "eagle3": folder / "eagle3", "prompts": prompts, "expected": expected}


def _register_overlapped_eagle3() -> None:
    """EAGLE-3 under a name for which the host does not switch overlap scheduling off on CPU."""
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Overlapped(CustomSpecAlgo):
        is_eagle = is_eagle3 = need_topk = lambda self: True
        carries_draft_hidden_states = lambda self: False  # noqa: E731

        def create_future_map(self, device: Any, *args: Any, **kwargs: Any) -> Any:
            return FutureMap(device, self, *args, **kwargs)

    @SpeculativeAlgorithm.register("OVERLAPPED_EAGLE3", supports_overlap=True, spec_class=Overlapped)
    def worker_class(server_args: Any) -> type:
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

        return EAGLEWorkerV2


def _check_engine(models: dict[str, Any], algorithm: str | None, page_size: int) -> int:
    """Compare every token with transformers'; returns the number of accepted drafts, over all prompts."""
    args: dict[str, Any] = {"model_path": str(models["target"]), "page_size": page_size, "skip_tokenizer_init": True}
    if algorithm is not None:
        args.update(
            speculative_algorithm=algorithm,
            speculative_draft_model_path=str(models["eagle3"]),
            speculative_num_steps=DRAFT_LENGTH,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=DRAFT_LENGTH + 1,
        )

    def run() -> list[dict[str, Any]]:
        import sglang

        cpu.install()
        _register_overlapped_eagle3()
        # As few arguments as a user needs: the platform's attention backend is found by itself.
        engine = sglang.Engine(dtype="float32", max_total_tokens=2048, log_level="warning", **args)
        info = engine.get_server_info()
        assert (info["device"], info["attention_backend"]) == ("cpu", "torch_native")
        assert info["disable_overlap_schedule"] == (algorithm == "EAGLE3")
        params = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
        outputs = engine.generate(input_ids=models["prompts"], sampling_params=params)
        engine.shutdown()
        return outputs

    outputs = in_fork(run)
    assert [output["output_ids"] for output in outputs] == models["expected"]
    return sum(output["meta_info"].get("spec_num_correct_drafts", 0) for output in outputs)


@pytest.mark.parametrize("page_size", [1, 16])
def test_engine_generates_what_transformers_does(models: dict[str, Any], page_size: int) -> None:
    _check_engine(models, None, page_size)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "OVERLAPPED_EAGLE3"])
def test_speculation_changes_no_token(models: dict[str, Any], algorithm: str, page_size: int) -> None:
    assert _check_engine(models, algorithm, page_size) > 0, "no draft was accepted: the test shows little"


@pytest.mark.slow
def test_spawned_processes_find_the_platform(models: dict[str, Any]) -> None:
    """A script that knows nothing of this package: its processes are spawned and rely on the entry points."""
    code = f"""
        import sglang
        engine = sglang.Engine(model_path={str(models["target"])!r}, dtype="float32", max_total_tokens=2048,
                               skip_tokenizer_init=True, log_level="warning")
        params = {{"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
        print("IDS", engine.generate(input_ids={models["prompts"][0]}, sampling_params=params)["output_ids"])
        engine.shutdown()
    """
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    env.pop("TORCHDYNAMO_DISABLE", None)  # set in this process by early_setup
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert f"IDS {models['expected'][0][:8]}" in done.stdout, done.stderr[-4000:]
