"""Drafts the next tokens of a loop's rows, from n-grams, a smaller model, the model's own heads or
transformers' candidate generators. Implements `rooms.SpeculationRoom`; imports no other optional
package."""

from .speculator import Speculator as Speculator
from .speculator import reason_against as reason_against
from .speculator import reasons_against_call as reasons_against_call
