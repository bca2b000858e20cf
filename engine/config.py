"""The engine's configuration: frozen, validated once, never written back. Derived sizes are values of their own."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.policies import PolicyConfig
from engine.policies.preemption import Preemption
from engine.speculate import DraftConfig, NoDrafts

TILE = 16


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CacheConfig(Frozen):
    """The paged KV pool. `num_blocks` wins over `memory_fraction`, the share of free memory that the pool takes.

    `dtype` auto is that of the arithmetic, but float16 beside weights in float16: half the memory to read.
    """

    block_size: int = Field(16, ge=TILE, le=256, description="tokens per block, a multiple of 16")
    num_blocks: int | None = Field(None, ge=2, description="blocks in the pool; block 0 is never handed out")
    memory_fraction: float = Field(0.5, gt=0.0, lt=1.0)
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float8_e4m3fn"] = "auto"
    prefix: bool = Field(True, description="keep computed blocks findable for later prompts")
    host_blocks: int = Field(0, ge=0, description="blocks in host memory for prefixes that the device has no room for")

    @field_validator("block_size")
    @classmethod
    def _whole_tiles(cls, value: int) -> int:
        if value % TILE:
            raise ValueError(f"must be a multiple of {TILE}, e.g. {value // TILE * TILE or TILE}")
        return value

    @model_validator(mode="after")
    def _something_to_keep(self) -> "CacheConfig":
        if self.host_blocks and not self.prefix:
            raise ValueError(
                f"host_blocks is {self.host_blocks} but prefix is false: the host tier keeps prefixes. "
                "Write prefix: true, or host_blocks: 0"
            )
        return self


class EngineConfig(Frozen):
    """Everything one engine needs to start.

    `model` is a catalogue name, a local folder with safetensors, a hub id or a .gguf file. `max_model_len` None means
    the model's own context. `dtype` auto is bfloat16 on GPUs; on CPUs it computes in float32 and keeps the weights of
    linears in float16, which halves what a step has to read. `quantization` int8 keeps them in eight bits. `drafts`
    says how the next tokens are guessed, `overlap` whether a step is planned while the one before runs, `graphs`
    whether decode steps on a GPU are recorded at start and replayed.
    `batch_invariant`: whether results depend on the batch is tried at start; if they do, require refuses to start and
    check warns. `threads` None means all cores. `evict_every_steps` k > 0 evicts a running request every k steps: a
    testing device that, like drafts and overlap, must change no token.
    """

    model: str = "smollm2-135m-instruct"
    model_cache: Path = Path("~/.cache/sluice")
    load_format: Literal["auto", "dummy"] = "auto"
    implementation: Literal["auto", "transformers"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    max_model_len: int | None = Field(None, ge=2)
    cache: CacheConfig = CacheConfig()
    policy: PolicyConfig = Preemption()
    drafts: DraftConfig = NoDrafts()
    overlap: bool = False
    graphs: bool = True
    batch_invariant: Literal["require", "check", "off"] = "check"
    threads: int | None = Field(None, ge=1)
    evict_every_steps: int = Field(0, ge=0)
