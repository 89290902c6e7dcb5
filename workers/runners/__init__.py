"""Engines that run one stage behind one interface."""
