"""Which steps stay: a pure function of the steps and their tags."""

from __future__ import annotations


def kept(
    tags: dict[int, str],
    *,
    keep_last: int,
    keep_newest: int = 2,
    keep_pending: int = 10,
) -> set[int]:
    """Steps that must stay on disk.

    The newest healthy step always stays, and so does every step that may still become
    one: a verdict comes some steps after the save, so a rule that counts steps alone
    deletes a step before it is judged. A run that nobody judges would keep everything;
    beyond `keep_pending` the oldest, which is judged first, and the newest ones stay.

    Args:
      tags: tag of every step on disk.
      keep_last: healthy steps to keep, the newest first; >= 1.
      keep_newest: steps to keep whatever their tag, the newest first; >= 1.
      keep_pending: pending steps to keep, of those newer than the newest healthy one;
        >= 2.
    Examples:
      >>> tags = {10: "healthy", 20: "healthy", 30: "pending", 40: "suspect"}
      >>> sorted(kept(tags, keep_last=1, keep_newest=1))
      [20, 30, 40]
    """
    steps = sorted(tags)
    healthy = [s for s in steps if tags[s] == "healthy"]
    newest = healthy[-1] if healthy else -1
    pending = [s for s in steps if tags[s] == "pending" and s > newest]
    if len(pending) > keep_pending:
        pending = [pending[0], *pending[1 - keep_pending :]]
    return {*healthy[-keep_last:], *steps[-keep_newest:], *pending}
