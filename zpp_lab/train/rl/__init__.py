"""Reinforcement learning: rewards, advantages, rollouts as batches, and sampled success.

A **rollout** is a set of prompts with several sampled completions each, a **group**. Rewards score
completions; advantages compare those of one group. Some optimizer steps learn from a rollout.
"""
