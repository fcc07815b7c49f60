"""What passes cost, how often candidates are right, and the plan that follows: estimates, predictions, planner."""
