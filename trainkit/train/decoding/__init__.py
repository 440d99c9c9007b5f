"""Tokens one after another: how the next is drawn, and a text that goes on."""
