"""Everything that defines a training run, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.train.losses import KINDS
from sgl_peagle.train.model import EMBEDDINGS
from sgl_peagle.train.partition import PARTITIONS
from sgl_peagle.train.rows import Cod

METHODS = ("peagle", "eagle3")
ATTENTION = ("auto", "flex", "sdpa")
SELECT = ("last", "best")
OPTIMIZERS = ("muon", "adamw")

#: A method's recipe, where a run does not say otherwise.
DEFAULTS: dict[str, dict[str, Any]] = {
    "peagle": {"layers": 4, "depths": 8, "embedding": "mask_row", "refused_weight": 0.1},
    "eagle3": {"layers": 1, "depths": 7, "embedding": "frozen", "refused_weight": 1.0},
}

#: Drafts per round that held-out acceptance is quoted at, unless fewer are trained.
SERVED = 7

#: What may differ between the first part of a run and its resumption: none of it changes the weights on a given device.
FREE_ON_RESUME = ("device", "steps", "epochs", "minutes", "log_every", "checkpoint_every", "eval_every")


@dataclass(frozen=True)
class Settings:
    """One run. What :data:`DEFAULTS` names may be left out (None) and is then the method's.

    Attributes:
        target, corpus: Folder or hub id; folder.
        method: ``peagle``, or ``eagle3`` (autoregressive, training-time test).
        layers: Decoder layers of the head.
        intermediate_size: Width of their MLPs; None: the target's.
        depths: K, drafts learned per round; for eagle3 T, the unrolled steps.
        cod_ratio, cod_floor, strict: See :mod:`sgl_peagle.train.rows`.
        embedding: One of :data:`~sgl_peagle.train.model.EMBEDDINGS`.
        mask_token_id: Id of the MASK token; None for eagle3.
        aux_layer_ids: Capture points, None for the default.
        loss: ``kl`` or ``ce``.
        refused_weight: Factor of a row behind a wrong draft; 1: all rows alike. See
            :class:`~sgl_peagle.train.partition.LossSettings`.
        optimizer: One of :data:`OPTIMIZERS`; see :func:`~sgl_peagle.train.weights.make_optimizer`.
        matrix_lr: Muon's peak learning rate, for the matrices.
        lr, embedding_lr: AdamW's peak learning rates; the second for a trained copy of the embedding.
        warmup, final_lr: Share of the steps that warm up; share of the peak at the end of the cosine.
        clip: Largest norm of the gradient.
        weight_decay: Of matrices, the optimiser's own; norms, MASK row, ``mask_hidden`` and embedding never decay.
        noise: Half the width of uniform noise on the hidden states that are fed, in units of each channel's scale.
        ema: Decay of the weights' running mean, which is then evaluated and exported; 0: the weights themselves.
        steps, epochs, minutes: Length of the run; exactly one is given.
        tokens_per_step: Tokens of text in a step.
        max_length: Documents are cut to so many tokens.
        holdout: Documents (the last ones) kept for evaluation.
        segments, partition: S of the sequence partition, and one of :data:`~sgl_peagle.train.partition.PARTITIONS`.
        attention: One of :data:`ATTENTION`.
        chunk: Rows whose logits exist at once.
        compile_loss: Fuse the passes over the logits with torch.compile.
        eval_every: Steps between evaluations; None for an eighth of the run.
        select: Which weights are exported: of the ``last`` step, or of the evaluation with the ``best`` walk.
        served: Drafts per round at which the walk is quoted and compared; None: 7, or ``depths`` if fewer.
    """

    target: str
    corpus: str
    method: str = "peagle"
    layers: Optional[int] = None
    intermediate_size: Optional[int] = None
    depths: Optional[int] = None
    cod_ratio: float = 0.7
    cod_floor: float = 0.2
    strict: bool = True
    embedding: Optional[str] = None
    mask_token_id: Optional[int] = None
    aux_layer_ids: Optional[tuple[int, ...]] = None
    loss: str = "kl"
    refused_weight: Optional[float] = None
    optimizer: str = "muon"
    matrix_lr: float = 0.02
    lr: float = 2e-3
    embedding_lr: float = 1.5e-4
    warmup: float = 0.03
    final_lr: float = 0.02
    clip: float = 1.0
    weight_decay: float = 0.0
    noise: float = 0.0
    ema: float = 0.0
    steps: Optional[int] = None
    epochs: Optional[float] = None
    minutes: Optional[float] = None
    tokens_per_step: int = 16384
    max_length: int = 2048
    holdout: int = 0
    seed: int = 0
    segments: int = 1
    partition: str = "recompute"
    attention: str = "auto"
    chunk: int = 4096
    compile_loss: bool = False
    device: str = "auto"
    log_every: int = 20
    checkpoint_every: int = 1000
    eval_every: Optional[int] = None
    select: str = "last"
    served: Optional[int] = None

    def __post_init__(self) -> None:
        for name, value in DEFAULTS.get(self.method, {}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, known in (
            ("method", METHODS), ("embedding", EMBEDDINGS), ("loss", KINDS), ("attention", ATTENTION),
            ("partition", PARTITIONS), ("select", SELECT), ("optimizer", OPTIMIZERS),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                _refuse(f"{name} is {getattr(self, name)!r}", "it is not known", f"use one of {', '.join(known)}")
        least = dict.fromkeys(
            "layers depths tokens_per_step segments chunk log_every checkpoint_every".split(), 1
        ) | {"max_length": 3, "holdout": 0, "seed": 0}  # fmt: skip
        for name, low in least.items():
            if getattr(self, name) < low:
                _refuse(f"{name} is {getattr(self, name)}", f"it must be at least {low}", f"use {low} or more")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            _refuse(f"intermediate_size is {self.intermediate_size}", "it is the width of the MLPs", "use 1 or more, or leave it out")
        if not 0 < self.cod_ratio <= 1 or not 0 <= self.cod_floor <= 1:
            _refuse(
                f"cod_ratio is {self.cod_ratio}, cod_floor {self.cod_floor}",
                "they are shares of the rows",
                "use a ratio in (0, 1] and a floor in [0, 1]",
            )
        if not 0 <= self.refused_weight <= 1:
            _refuse(
                f"refused_weight is {self.refused_weight}",
                "it is the share that a row behind a wrong draft keeps of its weight",
                "use 0 ... 1 (all rows alike)",
            )
        if not all(value > 0 for value in (self.matrix_lr, self.lr, self.embedding_lr, self.clip)):
            _refuse("a learning rate or the clip is not positive", "nothing would be learned", "use values above 0")
        self._check_regularisers()
        if self.eval_every is not None and self.eval_every < 1:
            _refuse(f"eval_every is {self.eval_every}", "it counts steps", "give at least 1, or leave it out")
        if self.select == "best" and not self.holdout:
            _refuse("select is 'best' without held-out documents", "nothing says which step is best", "give --holdout")
        if self.served is not None and not 1 <= self.served <= self.depths:
            _refuse(
                f"served is {self.served} with {self.depths} trained depths",
                "an evaluation runs the trained depths",
                f"use 1 ... {self.depths}",
            )
        given = [name for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "the length of the run is not given"
            _refuse(what, "exactly one of steps, epochs and minutes says when to stop", "give one of them")
        if getattr(self, given[0]) <= 0:
            _refuse(f"{given[0]} is {getattr(self, given[0])}", "nothing would be trained", "give a positive number")
        self._check_method()

    def _check_regularisers(self) -> None:
        if not 0 <= self.weight_decay <= 1:
            _refuse(
                f"weight_decay is {self.weight_decay}",
                "a step shrinks the matrices by its product with the learning rate",
                "use 0 (off) ... 1, for example 0.1",
            )
        if not 0 <= self.noise <= 1:
            _refuse(
                f"noise is {self.noise}",
                "it is in units of each channel's scale: more than 1 would drown it",
                "use 0 (off) ... 1, for example 0.05",
            )
        if not 0 <= self.ema < 1:
            _refuse(f"ema is {self.ema}", "it is the share of the mean that a step keeps", "use 0 (off) or, say, 0.999")

    def _check_method(self) -> None:
        if self.method == "peagle":
            if self.mask_token_id is None:
                _refuse(
                    "no MASK token id is given",
                    "MASK rows are fed the embedding of one reserved id, and which one is free depends on the tokenizer",
                    "pass --mask-token-id with an id that never occurs in text (SmolLM2: 16)",
                )
            if self.embedding == "frozen":
                _refuse("a P-EAGLE head with a frozen embedding", "its MASK row must learn", "use --embedding mask_row")
            return
        if self.layers != 1:
            _refuse(
                f"an EAGLE-3 head of {self.layers} layers",
                "the autoregressive baseline, and stock SGLang's drafter, is one layer",
                "use --layers 1",
            )
        if self.embedding != "frozen" or self.mask_token_id is not None:
            _refuse(
                "an EAGLE-3 head with an own embedding or a MASK id",
                "stock SGLang serves EAGLE-3 heads with the target's embedding",
                "leave out --embedding and --mask-token-id",
            )
        if self.segments != 1:
            _refuse("segments with eagle3", "the sequence partition is P-EAGLE's", "leave out --segments")

    @property
    def cod(self) -> Cod:
        """Sampling of rows; EAGLE-3 has next-token rows only, and unrolls them."""
        return Cod(self.depths if self.method == "peagle" else 1, self.cod_ratio, self.cod_floor)

    @property
    def quoted(self) -> int:
        """K at which held-out acceptance is quoted."""
        return self.served or min(SERVED, self.depths)

    @property
    def quoted_lr(self) -> float:
        """Peak learning rate of the matrices, which the log follows."""
        return self.matrix_lr if self.optimizer == "muon" else self.lr

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _refuse(what: str, why: str, fix: str) -> None:
    raise PEagleError(what, why, fix)


def check_resumed(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with a run under other settings.

    Raises:
        PEagleError: A setting that changes the weights differs.
    """
    differing = [
        f"{name} {saved.get(name)!r} -> {value!r}"
        for name, value in now.items()
        if name not in FREE_ON_RESUME and _plain(saved.get(name)) != _plain(value)
    ]
    if differing:
        raise PEagleError(
            f"the run was started with other settings: {'; '.join(differing)}",
            "a resumed run is the same run",
            "pass the same options, or start a new run in another folder",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
