"""Collectives: what travels on a wire, over which transport, and the count of it.

A **wire** is one of the five places where sharded training moves data. A **recipe** says which
codec each wire uses for which parameters, a **plan** what that moves in one step, in closed form.
The **ledger** counts what really moved and must equal the plan. Gather, reduction and update are
written once over a **transport**: process groups, or `peer/` for ranks that read each other's
memory.
"""
