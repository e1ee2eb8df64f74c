"""Attempts of a modelled job: they begin, carry their plan out, change state and ack, or die."""

from __future__ import annotations

from random import Random

from blake3 import blake3
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from snapshot.formats.record import slice_key
from snapshot.protocol.messages import BeginReply
from statebackend.errors import (
    CommitUnknownError,
    CorruptionError,
    FencedError,
    ObjectNotFoundError,
    StaleRequestError,
)
from tests.recovery.driver import Started, ack_of, base_of, begin_of, changed, part_of, replayed
from tests.recovery.modelled_job import FATES, Copy, Damaged, ModelledJob, Prepared, Upload, Where


class ModelledAttempts(ModelledJob):
    """Workers of a job: what each begins with is the state of the epoch before."""

    @precondition(lambda self: self.current is not None)
    @rule(random=st.randoms(use_true_random=False), fate=st.sampled_from(FATES))
    def attempt(self, random: Random, fate: str) -> None:
        self._attempt(random, random.choice(self.wheres), fate)

    def _attempt(self, random: Random, where: Where, fate: str) -> None:
        assert self.current is not None
        host = random.choice(["h1", "h1", "h2"])
        self.attempts += 1
        attempt, started = self.attempts, self.current
        reply, copy = self._begin(started, where, host, attempt, half=fate == "dies restoring")
        if copy is None or reply is None:
            return
        before = self.truth[self.batch - 1].get(where, {})
        if reply.layers:
            (layer,) = reply.layers
            assert (layer.epoch, layer.chain) == (reply.base_epoch, reply.chain)
            assert reply.durable_epoch == reply.base_epoch - 1
            if reply.durable_epoch in self.truth:
                assert copy.state == self.truth[reply.durable_epoch].get(where, {})
        else:
            assert copy.state == before
            assert copy.chain == reply.chain
            assert reply.durable_epoch == reply.base_epoch
        assert (copy.epoch, copy.chain) == (reply.durable_epoch, reply.durable_chain)
        if reply.grant is not None:
            assert reply.grant.chain == copy.chain
            self.uploads.append(Upload(started, reply.grant, where, copy.state, reply.generation))
        keys = random.sample([b"k0", b"k1", b"k2", b"k3"], random.choice([0, 1, 2, 2]))
        changes = {key: random.choice([None, b"x", b"y", b"z" * 40]) for key in keys}
        changes = {**self._initial(reply, where), **changes}
        after = changed(before, changes)
        delta = part_of(changes)
        copy.deltas[self.batch, delta.digest] = delta.data
        if fate == "dies":
            return
        base, large_bytes = None, 0
        if reply.base_due and base_of(after).size_bytes > reply.inline_budget_bytes:
            large_bytes = base_of(after).size_bytes
        elif reply.base_due:
            base = base_of(after)
        ack = ack_of(
            reply.chain,
            self._sent(delta, reply),
            self.batch,
            where[1],
            where[0],
            stamp_ms=self._stamp(),
            attempt=attempt,
            base=base,
            large_bytes=large_bytes,
            max_event_ms=random.choice([None, self.batch * 10 + random.randint(0, 30)]),
        )
        self.prepared.append(Prepared(started, ack, where, after))
        if fate == "acks":
            self._send(len(self.prepared) - 1)

    def _begin(
        self, started: Started, where: Where, host: str, attempt: int, *, half: bool
    ) -> tuple[BeginReply | None, Copy | None]:
        """Begin, and carry the plan out; None if the worker was told to die on the way."""
        copy = self.copies.setdefault((host, where), Copy())
        damaged: set[str] = set()
        while True:
            request = begin_of(
                self.batch,
                where[1],
                where[0],
                stamp_ms=self._stamp(),
                attempt=attempt,
                copy=copy.described(damaged),
                host=host,
            )
            try:
                reply, bodies = started.session.begin(request)
            except (FencedError, CommitUnknownError):  # of a record that was on its way
                self.crash()
                return None, None
            except (CorruptionError, ObjectNotFoundError):
                assert self.hurt  # never without damage
                self._heal()
                self.crash()  # it remembers what it found damaged
                return None, None
            assert reply.base_epoch == self.batch - 1
            self._check_times(reply)
            if reply.fresh and copy.epoch is not None:
                assert reply.reason
            if reply.fresh:
                copy = self.copies[host, where] = Copy()
            try:
                whole = self._carry_out(copy, reply, bodies, half=half)
            except Damaged as found:
                digest = found.digest
                if digest in damaged:
                    raise AssertionError("what is damaged was not gone around") from found
                damaged.add(digest)
                copy = self.copies[host, where] = Copy()
                continue
            if whole:
                return reply, copy
            if half:
                return reply, None

    def _carry_out(self, copy: Copy, reply: BeginReply, bodies: list[bytes], *, half: bool) -> bool:
        """As :meth:`_carried_out`; what is damaged is named as the coordinator wants it named."""
        try:
            return self._carried_out(copy, reply, bodies, half=half)
        except Damaged as found:
            kinds = {step.digest: step.kind for step in (*reply.layers, *reply.steps)}
            raise Damaged(slice_key(kinds[found.digest], found.digest)) from found

    def _carried_out(
        self, copy: Copy, reply: BeginReply, bodies: list[bytes], *, half: bool
    ) -> bool:
        """False where a local delta turned out damaged, or the worker died half way."""
        inline = iter(bodies)
        if reply.fresh and not reply.steps:
            copy.stand_at(reply.job_id, reply.durable_epoch, reply.durable_chain)
        for step in reply.steps:
            if step.source == "local":
                assert not reply.fresh
                data = copy.deltas[step.epoch, step.digest]
                if data == b"damaged":
                    del copy.deltas[step.epoch, step.digest]
                    return False
            elif step.source == "object":
                data = self._object(step.name, step.digest)
            else:
                data = next(inline) if step.size_bytes else b""
            if step.kind == "files":
                assert blake3(data).hexdigest() == step.digest
                after = self._files_state(data, step.digest)
            else:
                after = replayed(copy.state, data, step.digest)
            if half and after != copy.state:
                if copy.epoch is not None:
                    copy.applying = step.chain
                differing = [k for k in {*after, *copy.state} if after.get(k) != copy.state.get(k)]
                first = min(differing)
                copy.state = changed(copy.state, {first: after.get(first)})
                return False
            copy.state = after
            copy.stand_at(reply.job_id, step.epoch, step.chain)
        state = copy.state
        for layer in reply.layers:
            if layer.source == "local":
                data = copy.deltas[layer.epoch, layer.digest]
                if data == b"damaged":
                    del copy.deltas[layer.epoch, layer.digest]
                    return False
            elif layer.source == "object":
                data = self._object(layer.name, layer.digest)
            else:
                data = next(inline) if layer.size_bytes else b""
            state = replayed(state, data, layer.digest)
            assert state == self.truth[layer.epoch].get(self._where_of(copy), {})
        assert next(inline, None) is None
        return True

    def _where_of(self, copy: Copy) -> Where:
        return next(where for (_, where), one in self.copies.items() if one is copy)

    # --- acks, in time and late

    def _send(self, number: int) -> None:
        one = self.prepared.pop(number)
        live = one.started is self.current
        running = live and one.ack.epoch == self.batch
        newest = self.acked.get(one.where, (0, {}))[0]
        try:
            reply = one.started.session.ack(one.ack)
        except StaleRequestError:
            assert not running or one.ack.attempt < newest
            return
        except CommitUnknownError:
            if live:
                self.crash()
            return
        except FencedError:
            assert not live
            return
        if not live:  # a zombie may take acks in, and never makes a record of them
            return
        assert running
        assert one.ack.attempt >= newest
        self.acked[one.where] = one.ack.attempt, one.after
        self.events[one.where] = one.ack.max_event_ms
        everyone = {w for w in self.wheres if w[0] == one.where[0]}
        complete = everyone <= self.acked.keys()
        assert reply.durable is (complete and not one.started.coordinator.run.asynchronous)
        if complete:
            self.durable.add(one.where[0])

    @precondition(lambda self: self.prepared)
    @rule(random=st.randoms(use_true_random=False))
    def late_acks_arrive(self, random: Random) -> None:
        for _ in range(random.randint(1, len(self.prepared))):
            self._send(random.randrange(len(self.prepared)))
