"""Stands in for SGLang's kernel of the same name."""

from torch import Tensor


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch_size: int,
    width: int,
) -> None:
    """Writes each node's position, first child and next sibling. `mask[i, j]`: node j precedes node i, or is it."""
    for tree, rows in enumerate(mask[: batch_size * width * width].view(batch_size, width, width).tolist()):
        before = [[other for other in range(node) if rows[node][other]] for node in range(width)]
        parents = [max(nodes, default=-1) for nodes in before]
        for node in range(width):
            index[tree, node] = place = tree * width + node
            positions[place] = len(before[node]) + int(lengths[tree])
            later = range(node + 1, width)
            next_token[tree, node] = next((other for other in later if parents[other] == node), -1)
            siblings = (other for other in later if parents[other] == parents[node] >= 0)
            next_sibling[tree, node] = next(siblings, -1)
