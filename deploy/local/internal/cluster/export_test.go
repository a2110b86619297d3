package cluster

import "github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"

// The parts that need no cluster, for tests.
var (
	NoteDigests     = noteDigests
	Normalize       = normalize
	Transient       = transient
	NodeReady       = nodeReady
	CountPods       = countPods
	PendingRollouts = pendingRollouts
	PodProblems     = podProblems
	ApplySecrets    = applySecrets
	EnsureIdentity  = ensureSandboxPKI
	Ours            = ours
	IsComponent     = isComponent
	IsSupervisor    = isSupervisor
	Collects        = collects
	Ancestors       = ancestors
	WriteFiles      = writeFiles
	EnsurePKI       = ensureKubernetesPKI
	OwnPaths        = ownPaths
	Kept            = kept
)

// Remains finds what a cluster leaves: its tasks as "namespace/id", and its cgroups.
func Remains(c components.Config) (tasks, cgroups []string) {
	rest := findRemains(c)
	for _, task := range rest.tasks {
		tasks = append(tasks, task.namespace+"/"+task.id)
	}
	return tasks, rest.cgroups
}
