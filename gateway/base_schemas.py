"""What all request bodies have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

CONTRADICTION = "invalid_value"
"""Type of our own validators' errors; about the body as a whole where they name no field."""


def problem(message: str) -> PydanticCustomError:
    """Return an error for a validator to raise."""
    # The message is a template for pydantic: braces from a client must not be read as fields.
    return PydanticCustomError(CONTRADICTION, "{message}", {"message": message})


class StrictBody(BaseModel):
    """Base of all bodies and of most objects in them: unknown fields are kept as ``extras``."""

    # strict: "0.5" is no number and true is no integer, as in OpenAI's own API.
    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    @property
    def extras(self) -> dict[str, Any]:
        """Fields that this schema does not declare."""
        return self.model_extra or {}
