"""One process a rank: FSDP2 with the recipe's collectives."""
