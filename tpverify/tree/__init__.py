"""Draft trees: the structure, the DDTree builder, the acceptance walks, the random draws and the automatic budget."""

from tpverify.tree.accept import Accept, accept_greedy, accept_sampled, accept_walk
from tpverify.tree.budget import AutoBudget
from tpverify.tree.ddtree import build_ddtree, build_ddtree_topk
from tpverify.tree.draft_tree import DraftTree
from tpverify.tree.draws import sample_token, softmax, uniform

__all__ = [
    "Accept",
    "AutoBudget",
    "DraftTree",
    "accept_greedy",
    "accept_sampled",
    "accept_walk",
    "build_ddtree",
    "build_ddtree_topk",
    "sample_token",
    "softmax",
    "uniform",
]
