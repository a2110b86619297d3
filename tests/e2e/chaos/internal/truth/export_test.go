package truth

import (
	"time"

	"github.com/containerd/containerd/v2/core/containers"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// Note is what Watch does of one event.
func (o *Observer) Note(s *v1alpha1.Sandbox, gone bool) { o.note(s, gone) }

// Missing is what Watch does of a list.
func (o *Observer) Missing(there map[string]bool, now time.Time) { o.seen.missing(there, now) }

// Known is what was seen.
func (o *Observer) Known() (map[string]bool, map[string]time.Time) {
	return o.seen.all(), o.seen.ends()
}

// ContainerOf reads a container.
func ContainerOf(c containers.Container, running bool) audit.Container { return container(c, running) }

// IsContainerID tells whether a name is that of one of our containers.
func IsContainerID(name string) bool { return containerID.MatchString(name) }

// AgentOf is whose a directory is.
func AgentOf(dir string) string { return agentOf(dir) }
