"""AgentENV: reinforcement-learning environments for AI agents as forkable microVMs."""

__version__ = "0.1.0"
