"""What the configuration of every policy has in common: frozen, no unknown fields, and a way to build the policy."""

from pydantic import BaseModel, ConfigDict, Field

UNBOUNDED = 2**63  # tokens: a limit that never binds


class PolicyBase(BaseModel):
    """`max_num_seqs` is the most requests that run at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_seqs: int = Field(64, ge=1)
