// Package run is one run of the attack suite: it makes two tenants, has everything hostile try what it can, and removes all of it again.
// Run must be called once in a process.
package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/caller"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/load"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/pressure"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/rogue"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// Options configure a run.
type Options struct {
	// Bin is the directory of the built programs: escape-hostile and escape-agent.
	Bin string
	// Only are the parts to run; empty for all.
	Only []string
	// Out receives the progress.
	Out io.Writer
}

const (
	victim, hostile = "escape-victim", "escape-hostile"
	victimPool      = "victim"
	hostilePool     = "hostile"
	coldPool        = "cold"
	capacity        = 12
	slots           = 3
	// victimCPU is twice the request of the hostile agents. Requests are what divides processor time between Pods, and with equal ones
	// a sandbox that takes all that it may has half of each processor: the neighbor's work would take twice as long by right.
	victimCPU = "400m"
	// The ports of the neighbor and of the roommate.
	neighborPort, roommatePort = "7001", "7002"
	abstractName               = "escape-roommate"
	lifetime                   = "3600" // seconds; longer than any run
)

// part is a part of the suite.
type part struct {
	name string
	run  func(ctx context.Context, r *runner) error
}

func parts() []part {
	return []part{
		{"proof", func(ctx context.Context, r *runner) error {
			r.scene.Say("the same attacks in an open container")
			return inside.Open{
				Socket: r.scene.Socket, CgroupParent: "/fsb-local", Images: inside.Images(r.scene.Program), CanaryDir: r.canary.Dir, Env: r.scene.Env,
			}.Prove(ctx, r.scene.Log)
		}},
		{"sandbox", func(ctx context.Context, r *runner) error {
			stop, err := serveMetadata(ctx)
			if err != nil {
				return err
			}
			defer stop()
			return inside.Sandboxes(ctx, r.scene)
		}},
		{"image", func(ctx context.Context, r *runner) error {
			images := func(ctx context.Context, s *mesh.Scene) error { return inside.HostileImages(ctx, s, r.canary) }
			return inside.Capacity(ctx, r.scene, images, inside.WorkingDirs, inside.Arguments)
		}},
		{"caller", func(ctx context.Context, r *runner) error { return caller.Run(ctx, r.scene) }},
		{"agent", func(ctx context.Context, r *runner) error { return rogue.Run(ctx, r.scene) }},
		{"bomb", func(ctx context.Context, r *runner) error {
			if err := pressure.Inotify(ctx, r.scene); err != nil {
				return err
			}
			return pressure.Bombs(ctx, r.scene, r.samples)
		}},
		{"flood", func(ctx context.Context, r *runner) error {
			return pressure.Floods(ctx, r.scene, r.samples, mesh.Neighbor)
		}},
		{"squat", func(ctx context.Context, r *runner) error { return pressure.Squat(ctx, r.scene, r.agent) }},
	}
}

// PartNames returns the names of the parts.
func PartNames() (names []string) {
	for _, p := range parts() {
		names = append(names, p.name)
	}
	return names
}

// runner is one run.
type runner struct {
	Options
	scene    *mesh.Scene
	canary   *mesh.Canary
	agent    *corev1.Pod // of the hostile tenant
	samples  *pressure.Samples
	restarts map[string]int32
	begin    time.Time
}

// Run runs everything. An error means that the run failed; what succeeded is only in the report.
func Run(ctx context.Context, o Options) (report *suite.Report, err error) {
	selected, err := choose(o.Only)
	if err != nil {
		return nil, err
	}
	r := &runner{Options: o, begin: time.Now()}
	if r.scene, err = newScene(o.Bin, r.say); err != nil {
		return nil, err
	}
	defer r.scene.Close()
	if r.canary, err = mesh.NewCanary(mesh.CanaryParent); err != nil {
		return nil, err
	}
	defer r.canary.Remove()
	r.say("removing what another run has left")
	if err := r.scene.Sweep(ctx, victim, hostile); err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(ctx)
	defer func() {
		stop()
		r.say("removing everything")
		err = errors.Join(err, r.sweep(context.WithoutCancel(ctx)))
	}()
	if err := r.prepare(running); err != nil {
		return nil, err
	}
	for _, p := range selected {
		r.say("part %s", p.name)
		if err := p.run(running, r); err != nil {
			if ctx.Err() != nil {
				return nil, fmt.Errorf("part %s: %w", p.name, err)
			}
			// The others are made all the same.
			r.say("part %s has failed: %v", p.name, err)
			r.scene.Log.Made(suite.Attempt{Name: "all: part " + p.name, Does: "everything of this part", Success: "the part is not made to its end"}, "", "", suite.Brokenf("%w", err))
		}
	}
	if err := r.survivors(running); err != nil {
		return nil, err
	}
	report = r.scene.Log.Report()
	report.Seconds = time.Since(r.begin).Round(time.Second).Seconds()
	return report, nil
}

// choose returns the parts of some names; without names, all.
func choose(only []string) ([]part, error) {
	if len(only) == 0 {
		return parts(), nil
	}
	var out []part
	for _, name := range only {
		found := false
		for _, p := range parts() {
			if p.name == name {
				out, found = append(out, p), true
			}
		}
		if !found {
			return nil, fmt.Errorf("there is no part %q; there are %v", name, PartNames())
		}
	}
	return out, nil
}

func newScene(bin string, say func(string, ...any)) (*mesh.Scene, error) {
	s := &mesh.Scene{Log: &suite.Log{}, Say: say, Cold: coldPool}
	var err error
	if s.Program, err = os.ReadFile(filepath.Join(bin, "escape-hostile")); err != nil {
		return nil, fmt.Errorf("reading the hostile program: %w", err)
	}
	if s.Agent, err = os.ReadFile(filepath.Join(bin, "escape-agent")); err != nil {
		return nil, fmt.Errorf("reading the hostile agent: %w", err)
	}
	s.Mesh, err = mesh.Connect()
	return s, err
}

func (r *runner) say(format string, args ...any) {
	fmt.Fprintf(r.Out, "%7.1fs "+format+"\n", append([]any{time.Since(r.begin).Seconds()}, args...)...)
}

// prepare makes the tenants, their pools, the target, the neighbor that is measured, and the roommate.
func (r *runner) prepare(ctx context.Context) error {
	s := r.scene
	var err error
	if s.Victim, err = s.Tenant(ctx, victim, victimPool); err != nil {
		return err
	}
	if s.Hostile, err = s.Tenant(ctx, hostile, hostilePool); err != nil {
		return err
	}
	for _, i := range inside.Images(s.Program) {
		if err := i.Import(ctx, s.Node); err != nil {
			return err
		}
	}
	for _, p := range []struct {
		namespace, name string
		options         mesh.PoolOptions
	}{
		{victim, victimPool, mesh.PoolOptions{Agents: 1, Capacity: capacity, Slots: 1, CPU: victimCPU}},
		{hostile, hostilePool, mesh.PoolOptions{Agents: 1, Capacity: capacity, Slots: slots, Env: pressure.AgentEnv()}},
		{hostile, coldPool, mesh.PoolOptions{Agents: 1, Capacity: capacity}},
	} {
		if err := s.MakePool(ctx, p.namespace, p.name, p.options); err != nil {
			return err
		}
	}
	r.say("waiting until the pools are ready")
	if err := errors.Join(s.AwaitAgents(ctx, s.Victim, victimPool, 1, 1), s.AwaitAgents(ctx, s.Hostile, hostilePool, 1, slots), s.AwaitAgents(ctx, s.Hostile, coldPool, 1, 0)); err != nil {
		return err
	}
	s.Env = attack.Env{Canary: r.canary.Path, Secret: r.canary.Secret, Abstract: abstractName}
	spec := func(load, port, abstract string) *sandboxv1.SandboxSpec {
		return &sandboxv1.SandboxSpec{Image: inside.RootImage, Args: []string{load, lifetime, port, abstract}, Env: map[string]string{attack.EnvName: s.Env.String()}}
	}
	if s.Target, err = s.MakeTarget(ctx, s.Victim, mesh.Neighbor, spec(load.Neighbor, neighborPort, "escape-neighbor")); err != nil {
		return err
	}
	if _, err := s.MakeTarget(ctx, s.Hostile, mesh.Roommate, spec(load.Roommate, roommatePort, abstractName)); err != nil {
		return err
	}
	r.samples, _ = pressure.Follow(ctx, s.Victim, mesh.Neighbor)
	if err := r.addresses(ctx); err != nil {
		return err
	}
	r.restarts, err = s.Restarts(ctx)
	return err
}

// formerHealthPort is the port that agents had for probes, before these used a socket.
const formerHealthPort = "8081"

// addresses fills in where the ports are that a sandbox can reach.
func (r *runner) addresses(ctx context.Context) error {
	s := r.scene
	agents, err := s.Agents(ctx, hostile, hostilePool)
	if err != nil || len(agents) != 1 {
		return fmt.Errorf("looking for the hostile tenant's agent: %d: %w", len(agents), err)
	}
	r.agent = &agents[0]
	ip := r.agent.Status.PodIP
	var node corev1.Node
	if err := s.Kube.Get(ctx, client.ObjectKey{Name: r.agent.Spec.NodeName}, &node); err != nil {
		return fmt.Errorf("reading the node: %w", err)
	}
	gateway, err := url.Parse(s.Gateway)
	if err != nil {
		return fmt.Errorf("reading the gateway's address: %w", err)
	}
	api, err := url.Parse(s.KubeConfig.Host)
	if err != nil {
		return fmt.Errorf("reading the API server's address: %w", err)
	}
	for name, to := range map[string]*string{"agent": &s.Env.Agent, "metrics": &s.Env.Metrics} {
		if *to, err = mesh.PortOf(r.agent, name); err != nil {
			return err
		}
	}
	s.Env.Allocator, s.Env.Gateway, s.Env.APIServer = s.Addr, gateway.Host, api.Host
	s.Env.Kubelet = fmt.Sprintf("%s:%d", r.agent.Status.HostIP, node.Status.DaemonEndpoints.KubeletEndpoint.Port)
	s.Env.Health = ip + ":" + formerHealthPort
	s.Env.Neighbor, s.Env.Roommate = s.Target.AgentIP+":"+neighborPort, ip+":"+roommatePort
	s.Env.Metadata = metadataAddress
	return nil
}

// survivors looks at what must not have happened at any time: that a component was ended, or that the target was harmed.
func (r *runner) survivors(ctx context.Context) error {
	now, err := r.scene.Restarts(ctx)
	if err != nil {
		return err
	}
	evidence := ""
	for name, n := range now {
		if was, ok := r.restarts[name]; !ok || n > was {
			evidence += fmt.Sprintf("%s has restarted %d times, before it had %d; ", name, n, was)
		}
	}
	for name := range r.restarts {
		if _, ok := now[name]; !ok {
			evidence += name + " is gone; "
		}
	}
	r.scene.Log.Made(suite.Attempt{Name: "all: end a component", Does: "everything of this suite", Success: "a component of the mesh was restarted"}, "", evidence, errors.New("none was restarted"))
	r.scene.Log.Made(suite.Attempt{Name: "all: disturb another tenant", Does: "everything of this suite", Success: "the sandbox of the other tenant has changed"}, "",
		r.scene.Harmed(ctx, r.scene.Target), errors.New("it is as it was"))
	touched, err := r.canary.Touched()
	if err != nil {
		return err
	}
	r.scene.Log.Made(suite.Attempt{Name: "all: write to the node", Does: "everything of this suite", Success: "the directory of the canary has changed"}, "", touched, errors.New("it is as it was"))
	return nil
}

// sweep removes everything.
func (r *runner) sweep(ctx context.Context) error {
	err := r.scene.Sweep(ctx, victim, hostile)
	for _, i := range append(inside.Images(nil), rogue.Image(nil)) {
		_ = r.scene.Node.ImageService().Delete(ctx, i.Ref) // it need not be there
	}
	return err
}
