"""What runs inside the microVM, seen from the host: envd client, kernel, initramfs and base image."""
