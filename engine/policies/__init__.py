"""The policies to choose from. A policy is its own configuration: a new one is one new file and one name here."""

from engine.policies.preemption import Preemption

PolicyConfig = Preemption

__all__ = ["PolicyConfig", "Preemption"]
