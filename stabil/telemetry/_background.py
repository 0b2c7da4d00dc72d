"""Hands work to a thread of its own, so that training never waits for it."""

from __future__ import annotations

import atexit
import collections
import threading
import time
from collections.abc import Callable
from typing import Any


class Background:
    """A bounded queue and one thread that works it off in batches.

    `put` appends under a lock and returns; it never waits for the work. A full queue
    drops the newest item and counts it. Work that raises is counted, remembered in
    `last_error` and tried again up to `retries` times; it never reaches the caller. A
    thread that something has killed is started again by the next call, and what it had
    in hand counts as failed.

    Args:
      work: called with a non-empty list of items, on the thread.
      name: name of the thread.
      batch: items that start the work at once; also the most in one call.
      every_seconds: longest wait of an item before the work starts.
      capacity: items that may wait.
      retries: further attempts at a batch that failed, `every_seconds` apart.

    Attributes:
      dropped: items refused because the queue was full.
      failed: items given up because the work raised.
      last_error: the newest exception of the work, or None.
      revivals: how often the thread was started again.

    Examples:
      >>> seen = []
      >>> with Background(seen.extend, name="doc") as background:
      ...     background.put(1)
      True
      >>> seen
      [1]
    """

    def __init__(
        self,
        work: Callable[[list[Any]], Any],
        *,
        name: str,
        batch: int = 256,
        every_seconds: float = 2.0,
        capacity: int = 65536,
        retries: int = 0,
    ):
        self._work, self._batch, self._every = work, batch, every_seconds
        self._capacity, self._retries = capacity, retries
        self._items: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._taken = self._done = self._in_hand = 0
        self._hurry = self._closing = False
        self.dropped = self.failed = self.revivals = 0
        self.last_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _revive(self) -> None:
        """Starts the thread again if it is dead; the caller holds the lock."""
        if self._thread.is_alive():
            return
        self.revivals += 1
        self.failed += self._in_hand
        self._done += self._in_hand
        self._in_hand = 0
        name = self._thread.name
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def put(self, item: Any) -> bool:
        """Queues an item; False when it was dropped because the queue is full."""
        with self._changed:
            if self._closing or len(self._items) >= self._capacity:
                self.dropped += 1
                return False
            self._revive()
            self._items.append(item)
            self._taken += 1
            if len(self._items) in (1, self._batch):
                self._changed.notify_all()
            return True

    def flush(self, timeout_seconds: float = 10.0) -> bool:
        """Waits until everything queued so far is worked off; False on a timeout."""
        until = time.monotonic() + timeout_seconds
        with self._changed:
            goal, self._hurry = self._taken, True
            self._revive()
            self._changed.notify_all()
            while self._done < goal:
                left = until - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(min(left, 0.5))  # a dead thread tells nobody
            return True

    def close(self, timeout_seconds: float = 10.0) -> bool:
        """Works off what is left and ends the thread; False on a timeout."""
        atexit.unregister(self.close)
        with self._changed:
            if self._items:
                self._revive()
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait_for_work()
                if not self._items:
                    if self._closing:
                        return
                    self._hurry = False
                    continue
                size = min(self._batch, len(self._items))
                items = [self._items.popleft() for _ in range(size)]
                self._in_hand = size
            self._attempt(items)
            with self._changed:
                self._done += size
                self._in_hand = 0
                self._hurry = self._hurry and bool(self._items)
                self._changed.notify_all()

    def _wait_for_work(self) -> None:
        while not (self._items or self._closing or self._hurry):
            self._changed.wait()
        until = time.monotonic() + self._every
        while len(self._items) < self._batch and not (self._closing or self._hurry):
            left = until - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _attempt(self, items: list[Any]) -> None:
        for attempt in range(self._retries + 1):
            try:
                self._work(items)
                return
            except Exception as error:  # the work is foreign; training must go on
                self.last_error = error
            with self._changed:
                if attempt < self._retries and not self._closing:
                    self._changed.wait(self._every)
        self.failed += len(items)
