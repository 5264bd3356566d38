"""Object stores: places in them, and files and folders on their way there and back."""
