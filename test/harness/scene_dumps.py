"""Writes the outcome of a scene as each flight recorder would: as dumps of c10d's schema.

- ``ours``: this project's recorder. Messages are numbered, in groups of their two ranks; operations
  have all states. After a failure, operations that had started are retired, and not completed.
  Fields beyond the schema say which messages are in a batch.
- ``nccl``: torch's ``nccl`` (``nccl-legacy`` in 2.15). Members of a batch stay scheduled for ever;
  the entry after them is the batch, which has a state. The messages of a pair have no numbers.
- ``gloo``: torch's Gloo. Operations have no state but ``retired`` at their end, and messages have
  no entries. A dump has the ranks of one group only, under an empty name.
- ``hook``: the recorder that torch 2.15 attaches to backends without a recorder. In a batch it
  records the end of the last member only.
"""

import random

FORMS = ("ours", "nccl", "gloo", "hook")
START = 1_700_000_000 * 10**9
MS = 1_000_000

_NAMES = {
    "ours": {"barrier": "all_reduce_barrier"},
    "nccl": {"barrier": "all_reduce_barrier", "all_gather": "_all_gather_base"},
    "gloo": {},
    "hook": {"all_to_all": "all_to_all_single"},
}
_PREFIXES = {"ours": "nccl", "nccl": "nccl", "gloo": "gloo", "hook": "nccl2"}


def write(outcome, form, seed=0):
    """Returns {rank: content of its dump} for the ranks that have a dump."""
    chance = random.Random(seed)
    how = {
        "form": form,
        "failed": form == "ours" and chance.random() < 0.3,
        "timing": chance.random() < 0.5,
        "ring": chance.randint(1, 6) if chance.random() < 0.15 else 2000,
    }
    ranks = set(outcome.calls) - outcome.without_dump
    return {rank: _Rank(outcome, rank, how).content() for rank in sorted(ranks)}


class _Rank:
    def __init__(self, outcome, rank, how):
        self.outcome, self.rank, self.how, self.form = outcome, rank, how, how["form"]
        self.groups = [group for group in outcome.scene.groups if rank in group.ranks]
        self.entries = []
        self.details = []
        self.collectives = dict.fromkeys(self.groups, 0)
        self.messages = dict.fromkeys(self.groups, 0)
        self.op_ids = dict.fromkeys(self.groups, -1 if self.form == "hook" else 0)
        self.config = {}

    def content(self):
        calls = self.outcome.calls[self.rank]
        # The recorder of nccl lists a group once the group is used.
        used = list(dict.fromkeys(call.group for call in calls))
        for group in used if self.form == "nccl" else self.groups:
            key = ("", "") if self.form == "gloo" else (group.name, group.description)
            self.config[key] = group.ranks
        for call in calls:
            member = call.batch is not None
            self._add(call, first=not member or call is self._issued(call)[0])
            if self.form == "nccl" and member and call is self._issued(call)[-1]:
                self._add_batch(call)
        kept = self.entries[-self.how["ring"] :]
        while len(kept) < len(self.entries):
            # The ring keeps every operation that has not ended, so all members of an open batch.
            more = self.entries[-len(kept) - 1]
            if not any(entry["unended"] for entry in self.entries[: -len(kept)]):
                break
            kept = [more, *kept]
        config = {}
        for (name, description), ranks in sorted(self.config.items()):
            config.setdefault(name, {"name": name, "desc": description, "ranks": str(ranks)})
        for entry in kept:
            del entry["unended"]
        told = self.groups if self.form == "ours" else used
        status = {str(self.groups.index(group)): {} for group in told}
        dump = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": kept}
        return {**dump, "details": self.details} if self.form == "ours" else dump

    def _issued(self, call):
        return [each for each in call.batch if each.issued]

    def _add(self, call, first):
        group, form = call.group, self.form
        self.op_ids[group] += 1
        if call.is_message:
            self.messages[group] += first or form != "nccl"
        else:
            self.collectives[group] += 1
        if form == "gloo" and call.is_message:
            return
        name = _NAMES[form].get(call.op, call.op)
        process_group = (group.name, group.description)
        seqs = (self.collectives[group], self.messages[group])
        if call.is_message:
            numbers = {rank: group.ranks.index(rank) for rank in (call.rank, call.peer)}
            if form == "ours":
                pair = sorted((call.rank, call.peer))
                numbers = {rank: pair.index(rank) for rank in pair}
                process_group = (f"{group.name}:{pair[0]}-{pair[1]}", group.description)
                self.config[process_group] = pair
                upwards = (call.op == "send") == (call.rank < call.peer)
                seqs = (2 * call.number - upwards, self.messages[group])
                place = self._issued(call).index(call) if call.batch else 0
                batch = self.messages[group] - place if call.batch else 0
                detail = {"record_id": len(self.entries), "device": "cpu", "tag": call.tag}
                self.details.append({**detail, "batch": batch, "from_any": 0})
            arrow = "->" if call.op == "send" else "<-"
            name += f" {numbers[call.rank]}{arrow}{numbers[call.peer]}"
        else:
            seqs = (self.collectives[group], self.messages[group] if form != "ours" else 0)
        done = call.done
        stateless = call.batch is not None and form == "nccl"
        if form == "hook" and call.batch and call is not call.batch[-1]:
            done = False
        self._entry(call, name, process_group, seqs, done, stateless=stateless)

    def _add_batch(self, call):
        seqs = (self.collectives[call.group], self.messages[call.group])
        process_group = (call.group.name, call.group.description)
        self._entry(call, "coalesced", process_group, seqs, call.done, sizes=False)

    def _entry(self, call, name, process_group, seqs, done, *, stateless=False, sizes=True):
        behind = any(other.group is call.group for other in self._open_before(call))
        timed = self.form == "ours" or (self.form == "nccl" and self.how["timing"])
        started = done or (timed and not behind)
        if self.form == "gloo" or stateless:
            state, times = "scheduled", (None, None)
        elif done:
            end = START + call.completed * MS
            state, times = "completed", (START + call.created * MS, end)
        else:
            state = "started" if started else "scheduled"
            times = (START + call.created * MS if started else None, None)
        retired = done and not stateless
        if self.how["failed"] and state == "started":
            retired = True
        size = [[call.numel]] if sizes and call.op != "barrier" else []
        dtype = [call.dtype] * len(size)
        output = [[call.numel * len(call.group.ranks)]] if call.op == "all_gather" else size
        one_side = self.form in ("ours", "hook")
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": self.groups.index(call.group),
                "process_group": process_group,
                "collective_seq_id": seqs[0],
                "p2p_seq_id": seqs[1],
                "op_id": self.op_ids[call.group],
                "profiling_name": f"{_PREFIXES[self.form]}:{name}",
                "time_created_ns": START + call.created * MS,
                "input_sizes": [] if one_side and call.op == "recv" else size,
                "input_dtypes": [] if one_side and call.op == "recv" else dtype,
                "output_sizes": [] if one_side and call.op == "send" else output,
                "output_dtypes": [] if one_side and call.op == "send" else dtype,
                "state": state,
                "time_discovered_started_ns": times[0],
                "time_discovered_completed_ns": times[1],
                "retired": retired,
                "timeout_ms": 600_000,
                "is_p2p": call.is_message,
                "unended": not call.done,
            }
        )

    def _open_before(self, call):
        calls = self.outcome.calls[self.rank]
        return [each for each in calls[: calls.index(call)] if not each.done]
