"""Floor 6: nodes for LangGraph, their state, and the budget that is checked at compile time."""
