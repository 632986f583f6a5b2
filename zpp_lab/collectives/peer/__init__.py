"""Transport between ranks of one host that read each other's memory."""
