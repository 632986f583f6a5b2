"""What stands beside training: plan it, measure it, export its weights. The command line alone
imports this room."""
