"""No order of arrivals, cancels and judgements starves a session, mixes up its jobs or loses one."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_service.queue import MAX_PASSED, JobQueue

SESSIONS = range(1, 5)
ANY_SESSION = st.sampled_from(SESSIONS)
ROUND = len(SESSIONS) - 1


@dataclass(frozen=True, slots=True)
class Named:
    """A job that is nothing but its name."""

    key: tuple[int, int]


class QueueLife(RuleBasedStateMachine):
    """The queue against plain lists, and a count of the jobs that each session sees pass."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: JobQueue[Named] = JobQueue()
        self.waiting: defaultdict[int, list[Named]] = defaultdict(list)
        self.passed: Counter[int] = Counter()
        """Jobs of others that were taken since a session waits, or since its last turn or judgement."""

        self.next_id = 1

    @rule(session=ANY_SESSION, count=st.integers(1, 12))
    def put(self, session: int, count: int) -> None:
        """A session asks for some prompts at once."""
        for _ in range(count):
            job = Named((session, self.next_id))
            self.next_id += 1
            self.queue.put(job)
            self.waiting[session].append(job)

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """A prompt is cancelled."""
        session = data.draw(st.sampled_from([one for one in SESSIONS if self.waiting[one]]))
        job = data.draw(st.sampled_from(self.waiting[session]))
        self.queue.remove(job.key)
        self.waiting[session].remove(job)
        if not self.waiting[session]:
            del self.passed[session]

    @rule(session=ANY_SESSION, is_last=st.booleans())
    def judge(self, session: int, is_last: bool) -> None:
        """A job of a session has kept the engine waiting, or has not."""
        (self.queue.put_last if is_last else self.queue.put_in_turn)(session)
        self.passed.clear()

    @rule(count=st.integers(1, 40))
    def take(self, count: int) -> None:
        """The engine computes some jobs, oldest first inside a session."""
        for _ in range(count):
            job = self.queue.take()
            if job is None:
                assert not any(self.waiting.values())
                return
            session = job.key[0]
            assert job is self.waiting[session].pop(0), "a session's jobs changed places"
            del self.passed[session]
            for other in SESSIONS:
                self.passed[other] += bool(self.waiting[other]) and other != session
            self.nobody_starves()

    @invariant()
    def nothing_is_lost(self) -> None:
        """What waits is what came and was neither taken nor removed."""
        self.queue.check_integrity()
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        for session in SESSIONS:
            others = any(jobs for other, jobs in self.waiting.items() if other != session)
            assert self.queue.others_wait(session) == others

    def nobody_starves(self) -> None:
        """A session in turn sees one job of each other, one that is last a round for each of its like."""
        num_last = sum(map(self.queue.is_last, SESSIONS))
        for session, passed in self.passed.items():
            if self.queue.is_last(session):
                assert passed < num_last * (MAX_PASSED + 1)
            else:
                assert passed <= ROUND + ROUND // MAX_PASSED + 1


TestQueueLife = QueueLife.TestCase
