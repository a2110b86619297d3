package truth

import (
	"time"

	"github.com/containerd/containerd/v2/core/containers"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

// Note is what Watch does with one event.
func (o *Observer) Note(s *v1alpha1.Sandbox, deleted bool) { o.note(s, deleted) }

// Missing is what Watch does with a list.
func (o *Observer) Missing(present map[string]bool, now time.Time) { o.history.missing(present, now) }

// Known returns the history.
func (o *Observer) Known() (map[string]bool, map[string]time.Time) {
	return o.history.all(), o.history.ends()
}

// ContainerOf reads a container.
func ContainerOf(c containers.Container, running bool) audit.Container { return container(c, running) }

// IsContainerID reports whether a name is the id of one of our containers.
func IsContainerID(name string) bool { return containerID.MatchString(name) }

// AgentOf returns the agent that made a directory.
func AgentOf(dir string) string { return agentOf(dir) }
