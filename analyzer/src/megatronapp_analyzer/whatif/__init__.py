"""Analyse how much time operations of recorded steps have cost that took longer than usual.

The method is that of Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025).
"""
