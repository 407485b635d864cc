"""QEMU (microvm machine, KVM or TCG) as a driver of the VMM contract."""
