"""What host libraries need to see the device; each module is used only where its host is installed."""
