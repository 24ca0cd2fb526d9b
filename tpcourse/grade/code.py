"""A learner's code, brought onto as many ranks as a case asks for."""

from collections.abc import Callable

from torch import Tensor

from tpcourse.grade.case import Case
from tpcourse.grade.judge import Verdict, judge
from tpcourse.grade.session import Fault, Outcome, Session

Command = tuple[dict, list[Tensor]]


class Code:
    """Code in ``parts`` parts; ``load(start, stop)`` is the command that brings parts start to stop into a
    rank.

    Ranks stay alive from call to call. After a fault they are gone, and the next call starts new ones.
    ``seconds`` is the time that loading, and each call, may take.
    """

    def __init__(self, load: Callable[[int, int], Command], seconds: float) -> None:
        self.load, self.seconds = load, seconds
        self.sessions: dict[int, tuple[Session, int]] = {}
        self.load_fault: Fault | None = None

    def call(self, case: Case, name: str, parts: int) -> Outcome:
        """Call ``name`` as ``case`` says, after the first ``parts`` parts of the code."""
        nothing = [{} for _ in range(case.ranks)]
        if not self.load_fault:
            session = self._loaded(case.ranks, parts)
        if self.load_fault:
            return Outcome(nothing, nothing, [], [], self.load_fault)
        header = {"do": case.do, "name": name, "settings": case.settings}
        return session.run([(header, inputs) for inputs in case.inputs], self.seconds)

    def verdicts(self, cases: list[Case], name: str, parts: int) -> list[Verdict]:
        """One verdict per case, up to the first that fails."""
        found: list[Verdict] = []
        for case in cases:
            found.append(judge(case, self.call(case, name, parts)))
            if not found[-1].passed:
                break
        return found

    def close(self) -> None:
        for session, _ in self.sessions.values():
            session.close()

    def _loaded(self, ranks: int, parts: int) -> Session:
        session, have = self.sessions.get(ranks, (None, 0))
        if session is None or not session.alive:
            session, have = Session(ranks), 0
        if have < parts:
            self.sessions[ranks] = session, parts
            self.load_fault = session.run([self.load(have, parts)] * ranks, self.seconds).fault
        return session
