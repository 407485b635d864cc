"""Network slots: one namespace a sandbox, with its addresses, NAT and egress policy."""
