package task

import (
	"os"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
)

// MapOwners makes the mounts of a container, with the owners of a user namespace. The files are its root, and then its mounts.
func MapOwners(p *plan.Plan, users *os.File) (files []*os.File, err error) {
	m, err := openMounts(p)
	if err != nil {
		return nil, err
	}
	return m.files, m.mapOwners(users)
}
