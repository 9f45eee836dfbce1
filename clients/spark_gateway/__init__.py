"""HTTP for apps that speak OpenAI's or Anthropic's dialect: knows the daemon's client socket and no model."""
