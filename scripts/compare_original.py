"""Compares the logits of powerinfer and the original PowerInfer; see compare-original.sh."""

import array
import json
import sys
from pathlib import Path

LIMIT = 0.003  # largest difference, as a share of the largest logit


def main():
    name, ours, theirs = sys.argv[1:]
    data = Path(ours).read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8 : 8 + length])["logits"]
    start, end = tensor["data_offsets"]
    ours = array.array("f", data[8 + length + start : 8 + length + end])
    theirs = array.array("f", Path(theirs).read_bytes())
    assert len(ours) == len(theirs), f"{len(ours)} logits from us, {len(theirs)} from the original"
    largest = max(map(abs, ours))
    difference = max(abs(one - other) for one, other in zip(ours, theirs))
    width = tensor["shape"][1]
    rows = [(ours[at : at + width], theirs[at : at + width]) for at in range(0, len(ours), width)]
    same = sum(one.index(max(one)) == other.index(max(other)) for one, other in rows)
    print(f"{name}: largest difference {difference:.4f}, largest logit {largest:.1f}; same most probable token at {same} of {len(rows)} positions")
    if not difference <= LIMIT * largest or same != len(rows):
        sys.exit(f"error: {name} differs")


if __name__ == "__main__":
    main()
