"""Checks that any engine or backend must pass, for people who write one.

`ENGINE_CHECKS` and `BACKEND_CHECKS` are lists of `Check`; each has a name and a rule, and `run` raises
`CheckFailed` with what was expected and found, or `Skipped` with why it does not apply. In pytest:

    @pytest.mark.parametrize("check", ENGINE_CHECKS, ids=str)
    def test_my_engine(check): check.run(EngineSubject(make_my_engine()))
"""

from kvspan.conformance.backends import BACKEND_CHECKS, BackendSubject
from kvspan.conformance.checks import Check, CheckFailed, Skipped
from kvspan.conformance.engines import ENGINE_CHECKS
from kvspan.conformance.subject import EngineSubject

__all__ = [
    "ENGINE_CHECKS",
    "BACKEND_CHECKS",
    "EngineSubject",
    "BackendSubject",
    "Check",
    "CheckFailed",
    "Skipped",
]
