"""The policies to choose from: a new one is one new file and one name here.

Each file has a frozen configuration, chosen by its `kind`, whose `build` makes the policy that plans the steps.
"""

from typing import Annotated

from pydantic import Field

from engine.policies.preemption import Preemption
from engine.policies.retract import Retract
from engine.policies.static import Static

PolicyConfig = Annotated[Preemption | Retract | Static, Field(discriminator="kind")]

__all__ = ["PolicyConfig", "Preemption", "Retract", "Static"]
