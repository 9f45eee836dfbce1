"""Learns from routed ids which experts are hot."""
