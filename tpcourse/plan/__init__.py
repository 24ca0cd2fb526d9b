"""Which parallelism where: the search for a layout under a memory budget."""

from tpcourse.plan.cost import Cost, cost
from tpcourse.plan.layout import LayerPlan, Plan
from tpcourse.plan.plans import Plans, plan

__all__ = ["Cost", "LayerPlan", "Plan", "Plans", "cost", "plan"]
