package cgroup

// At returns a Tree at a directory that need not have cgroups.
func At(root string, unified bool) *Tree { return &Tree{root: root, unified: unified} }
