"""Continuous batching: which tokens of which answers run next.

A round is one forward: every running answer's next token, and beside them a piece of the prompts
that are still being read. In vLLM this is the scheduler with its block manager, in SGLang the
scheduler with its radix cache. Here pages are attnd's: where it answers that none are left, the
answer that came last gives up its sequence and is computed again later.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch
from attnd.errors import AttndError, OutOfPages, OutOfSequences

from examples.serve.answers import Answer, Delta, Request, Sampling, TokenLogprob
from examples.serve.runner import Row, Runner
from examples.serve.sampler import sample
from examples.serve.text import TextStream

LOG: Final = logging.getLogger("serve")
RETRY_S: Final = 0.5
WAIT_S: Final = 60.0
"""How long answers wait for an attnd that does not answer."""
SHARED: Final = 64
"""Tokens beyond the cached ones in common with a prompt that is being read: worth waiting for."""
MOST_FAILURES: Final = 5
"""Of forwards, one after another, before the running answers end with an error."""


class Scheduler:
    """Runs in a thread of its own; `submit` and `cancel` may be called from any.

    `runner.max_rows` answers run at once. A forward has `runner.max_tokens` tokens at most.
    """

    def __init__(self, runner: Runner, tokenizer: Any, ends: set[int]) -> None:
        self._runner, self._tokenizer, self._ends = runner, tokenizer, ends
        self._messages: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[Answer] = []
        self._running: list[Answer] = []
        self._closed = False
        self._full = False  # no pages were left, and no answer has ended since
        self._failures = self.preemptions = 0
        self._thread = threading.Thread(target=self._run, name="scheduler")

    def start(self) -> None:
        self._thread.start()

    def submit(
        self, prompt: Sequence[int], sampling: Sampling, count: int, emit: Callable[[Delta], None]
    ) -> Request:
        """`count` answers to a prompt; each ends with a Delta that has `finish` or `error`."""
        request = Request(list(prompt), sampling, emit)
        for index in range(count):
            generator = None
            if sampling.seed is not None:
                generator = torch.Generator().manual_seed(sampling.seed + index)
            text = TextStream(self._tokenizer, sampling.stop)
            request.answers.append(Answer(request, index, list(prompt), text, generator))
        # The first answer reads the prompt; the others are forks of it.
        self._messages.put(lambda: self._waiting.append(request.answers[0]))
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request's answers and free their pages; nothing is emitted any more."""
        self._messages.put(lambda: self._drop(request))

    def change(self, change: Callable[[], None], salt: str | None = None) -> Future[None]:
        """Change the model between two forwards, as `Runner.change` does: running answers continue
        by the changed model, and their KV is computed again. `change` runs in this thread."""
        done: Future[None] = Future()

        def work() -> None:
            self._restart_answers()
            try:
                done.set_result(self._runner.change(change, salt))
            except Exception as error:
                done.set_exception(error)
                raise

        self._messages.put(work)
        return done

    def stop(self) -> None:
        """End all requests with an error; later ones are not answered."""
        self._messages.put(None)

    def close(self) -> None:
        """Stop, delete the sequences and end the thread."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        self._runner.session.take_over()
        while not self._closed:
            try:
                self._round()
            except Exception as error:
                self._recover(error)
        self._fail_all("the server is stopping")
        self._runner.close()

    def _round(self) -> None:
        self._receive(wait=not (self._waiting or self._running))
        try:
            self._admit()
            if self._running:
                self._forward()
                self._failures = 0
        except OutOfPages:
            self._preempt()

    def _receive(self, *, wait: bool) -> None:
        """Carry out what other threads asked for."""
        while wait or not self._messages.empty():
            message, wait = self._messages.get(), False
            if message is None:
                self._closed = True
            else:
                message()

    def _admit(self) -> None:
        """Start waiting answers in their order, as far as there is room."""
        most = self._runner.max_rows
        while len(self._running) < most and not (self._full and self._running):
            answer = next((one for one in self._waiting if not self._awaits_pages(one)), None)
            if answer is None:
                return
            try:
                answer.sequence, answer.stored = self._runner.create(answer.tokens)
            except (OutOfPages, OutOfSequences):
                if not self._running:
                    raise
                return
            if answer.generated == 0 and answer.index == 0:
                answer.request.cached_tokens = answer.stored
            answer.committed = answer.stored
            self._waiting.remove(answer)
            self._running.append(answer)

    def _awaits_pages(self, answer: Answer) -> bool:
        """Whether a prompt that is being read begins alike: its pages will be in the cache soon."""
        read = [(r.request.prompt, r.committed + SHARED) for r in self._running if r.missing > 1]
        return any(n < len(prompt) and answer.tokens[:n] == prompt[:n] for prompt, n in read)

    def _forward(self) -> None:
        """One forward: a token of every decode, and pieces of prompts up to the limit."""
        left, batch = self._runner.max_tokens - self._runner.max_rows, list[tuple[Answer, Row]]()
        for answer in self._running:
            count = 1 if answer.missing == 1 else min(answer.missing, left)
            if answer.missing > 1:
                left -= count
            if count and answer.sequence is not None:
                new = answer.tokens[answer.stored : answer.stored + count]
                batch.append((answer, Row(answer.sequence, new, answer.stored)))
        logits = self._runner.forward([row for _, row in batch])
        ready = list[tuple[Answer, int]]()
        for at, (answer, row) in enumerate(batch):
            answer.stored += len(row.tokens)
            if answer.missing == 0:
                ready += [(one, at) for one in self._extended(answer)]
        if not ready:
            return
        wanted = [(one.request.sampling, one.generator) for one, _ in ready]
        chosen = sample(logits[[at for _, at in ready]], wanted)
        for (answer, _), (token, logprob) in zip(ready, chosen, strict=True):
            self._append(answer, token, logprob)

    def _extended(self, answer: Answer) -> list[Answer]:
        """All of an answer's tokens have KV: it and its forks continue."""
        if answer.generated or answer.index:
            return [answer]
        self._commit(answer)
        return [answer, *self._fork(answer)]

    def _fork(self, first: Answer) -> list[Answer]:
        """The other answers to a prompt continue from here."""
        known = [*self._waiting, *self._running]
        new = [one for one in first.request.answers if one.generated == 0 and one not in known]
        room = self._runner.max_rows - len(self._running)
        others, self._waiting[:0] = new[:room], new[room:]
        if not others or first.sequence is None:
            return []
        try:
            made = self._runner.fork(first.sequence, first.stored, len(others))
        except (OutOfPages, OutOfSequences):
            self._waiting[:0] = others
            return []
        for answer, sequence in zip(others, made, strict=True):
            answer.sequence, answer.stored = sequence, first.stored
            answer.committed = first.committed
        self._running += others
        return others

    def _append(self, answer: Answer, token: int, logprob: TokenLogprob | None) -> None:
        """Emit a token's text, and end the answer where it is over."""
        answer.tokens.append(token)
        is_end = token in self._ends
        text = "" if is_end else answer.text.push(token)
        is_full = answer.generated >= answer.request.sampling.max_tokens
        is_over = is_end or answer.text.stopped
        finish: Any = "stop" if is_over else "length" if is_full else None
        if finish:
            text += answer.text.finish()
            self._running.remove(answer)
        logprobs = () if logprob is None or is_end else (logprob,)
        answer.request.emit(Delta(answer.index, text, 1, logprobs, finish))
        if finish:
            self._commit(answer)
            self._release([answer])

    def _commit(self, answer: Answer) -> None:
        """Cache the stored pages: the next turn of a chat begins with it."""
        if answer.sequence is not None and answer.stored > answer.committed:
            tokens = answer.tokens[: answer.stored]
            answer.committed = self._runner.commit(answer.sequence, tokens, answer.committed)

    def _release(self, answers: Sequence[Answer]) -> None:
        sequences = [one.sequence for one in answers if one.sequence is not None]
        for answer in answers:
            answer.forget()
        if sequences:
            self._full = False
            self._runner.delete(sequences)

    def _preempt(self) -> None:
        """attnd has no pages left: the answer that came last waits, and is computed again."""
        if len(self._running) <= 1:
            alone = (self._running or self._waiting)[0]
            alone.request.emit(Delta(0, error="attnd has no pages left for this request alone"))
            return self._drop(alone.request)
        last = self._running.pop()
        self._waiting.insert(0, last)
        self._release([last])
        self.preemptions += 1
        self._full = True

    def _recover(self, error: Exception) -> None:
        """attnd ended or restarted: connect, and compute running answers again."""
        is_expected = isinstance(error, AttndError)
        LOG.warning("running answers are computed again: %s", error, exc_info=not is_expected)
        self._restart_answers()
        self._failures += 1 if is_expected else MOST_FAILURES
        if self._failures > MOST_FAILURES:
            self._fail_all(f"the work fails again and again: {error}")
        until = time.monotonic() + WAIT_S
        while not self._closed:
            try:
                self._receive(wait=False)
                return self._runner.reconnect()
            except Exception as failure:
                if time.monotonic() > until:
                    self._fail_all(f"attnd does not answer: {failure}")
            time.sleep(RETRY_S)

    def _restart_answers(self) -> None:
        """Running answers wait, and are computed again: their sequences are lost."""
        for answer in self._running:
            answer.forget()
        self._waiting[:0] = self._running
        self._running.clear()

    def _drop(self, request: Request) -> None:
        for group in (self._waiting, self._running):
            group[:] = [one for one in group if one.request is not request]
        self._release(request.answers)

    def _fail_all(self, message: str) -> None:
        """Ends all requests with an error; their sequences are lost, or deleted by the caller."""
        for request in {one.request: None for one in (*self._waiting, *self._running)}:
            request.emit(Delta(0, error=message))
        self._waiting.clear()
        self._running.clear()
