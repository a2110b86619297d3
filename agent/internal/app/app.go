package app

import (
	"context"
	"crypto/rand"
	"math"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/pin"
	agentrpc "github.com/fast-sandbox/fast-sandbox/agent/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// maxMessage is the largest message of a caller: the input of a process.
const maxMessage = 8 << 20

// closeTimeout is how long canceled creates have to clean up at shutdown.
const closeTimeout = 20 * time.Second

// Run runs the agent until ctx ends. Sandboxes run on, and the next agent process adopts them.
func Run(ctx context.Context, cfg *Config) error {
	handler, err := shared.ParseHandler(cfg.RuntimeHandler)
	if err != nil {
		return err
	}
	client, err := shared.Dial(cfg.ContainerdSocket, cfg.ContainerdNamespace)
	if err != nil {
		return err
	}
	defer client.Close()
	runtime := ctrd.New(cfg.runtime(ctx, client, handler))
	defer runtime.Close()
	store := logs.New(logs.Config{Root: cfg.LogRoot, Owner: cfg.PodUID, MaxBytes: cfg.LogMaxBytes})
	process := rand.Text()
	slots := slot.New(slot.Config{
		Runtime: runtime, Logs: store, AgentUID: cfg.PodUID, AgentPool: cfg.Pool, AgentProcess: process, Min: cfg.SlotsMin, Max: cfg.SlotsMax,
		Starters: starters(handler),
	})
	hub := status.New(cfg.info(runtime))
	dir, err := state.Open(cfg.StateDir)
	if err != nil {
		return err
	}
	pinned, err := pin.Open(pin.Config{Runtime: runtime, Files: dir, Publish: hub.SetPinnedImages})
	if err != nil {
		return err
	}
	figures := &meters{runtime: runtime, pool: cfg.Pool}
	manager, guard, err := cfg.sandboxes(process, dir, runtime, store, slots, hub, figures.ended)
	if err != nil {
		return err
	}
	registry, err := figures.start(manager, cfg.MaxDisk, hub)
	if err != nil {
		return err
	}
	server, err := cfg.server(ctx, guard, registry)
	if err != nil {
		return err
	}
	closing := make(chan struct{})
	service := agentrpc.New(agentrpc.Config{Sandboxes: manager, Status: hub, Pinned: pinned, Logs: store, Runtime: runtime}, closing)
	register(server, runtime, service, figures.service(service, cfg.info(runtime)))
	m := &monitor{runtime: runtime, manager: manager, status: hub, ready: server.SetReady, clock: clock.RealClock{},
		adopted: func(ctx context.Context) { cfg.limitMemory(ctx, runtime) }, apparmor: runtime.AppArmor,
		users: func() (bool, string) { return runtime.Users(), runtime.UsersOff() }}

	g := daemon.NewGroup()
	g.Go("gRPC", server.Run)
	g.Go("monitor", m.run)
	g.Go("images", pinned.Run)
	g.Go("slots", func(ctx context.Context) error { return slots.Run(ctx, hub.SetSlots) })
	g.Go("closing", func(ctx context.Context) error { return closeAfter(ctx, manager, closing) })
	g.Go("disk", figures.disk.Run)
	g.After("logs", store.Run)
	cfg.Serve(g, registry, server.Health())
	logr.FromContextOrDiscard(ctx).Info("agent listening", obs.KeyAddress, server.Addr().String(), obs.KeyPod, cfg.PodNamespace+"/"+cfg.PodName)
	return g.Run(ctx)
}

// register registers the agent's services.
func register(server *rpc.Server, runtime *ctrd.Runtime, service *agentrpc.Service, usages *agentrpc.Usages) {
	usagev1.RegisterUsageServiceServer(server, usages)
	agentv1.RegisterAgentServiceServer(server, service)
	processes := agentrpc.NewProcesses(service, runtime)
	processv1.RegisterProcessServiceServer(server, processes)
	filesystemv1.RegisterFilesystemServiceServer(server, agentrpc.NewFiles(processes))
	tunnelv1.RegisterTunnelServiceServer(server, agentrpc.NewTunnels(processes))
}

// starters is how many slots start concurrently on an idle node. Our shim mostly waits for containerd then, while an OCI runtime keeps a processor
// busy for each slot.
func starters(handler shared.Handler) int {
	if handler.IsOwn() {
		return 4
	}
	return 1
}

// server returns the agent's server, without its services.
func (c *Config) server(ctx context.Context, guard func(context.Context, string) error, registry prometheus.Registerer) (*rpc.Server, error) {
	users, err := c.users()
	if err != nil {
		return nil, err
	}
	return rpc.NewServer(ctx, rpc.ServerConfig{
		Address: c.BindAddress, TLS: c.TLS, Allow: allow(), Users: users, Guard: guard, Registry: registry, MaxRecvBytes: maxMessage, Files: true,
	})
}

// runtime returns the configuration of the runtime.
func (c *Config) runtime(ctx context.Context, client *client.Client, handler shared.Handler) ctrd.Config {
	settings := ctrd.Config{
		Client: client, Handler: handler, Snapshotter: c.Snapshotter, LogRoot: c.LogRoot, PodUID: c.PodUID,
		NetNSPath: c.NetNSPath, CgroupParent: c.CgroupParent, CgroupRoot: c.CgroupRoot,
		DockerConfig: c.DockerConfig, InsecureRegistries: c.InsecureRegistries,
		VerifyImages: c.ImagePolicy == imageVerify, MaxImageBytes: c.MaxImageBytes, SlotRoot: c.SlotRoot, SandboxInit: c.SandboxInit, Shim: c.Shim,
		Users: ctrd.UserNamespace(c.UserNamespace), IDs: c.ids(),
		AddCapabilities: c.AddCapabilities,
	}
	if !handler.IsOwn() { // its shims do this on the host
		settings.AppArmor = apparmor.Local().Load(ctx)
	}
	return settings
}

// ids returns the ranges of user ids of the node: what is in use is noted where all its agents see it.
func (c *Config) ids() idrange.Ranges {
	return idrange.Ranges{Dir: idrange.Dir(c.SlotRoot), First: c.FirstUserID, Count: c.UserIDRanges}
}

// closeAfter waits for the end of ctx, and then ends the streams without an end and the manager's work.
func closeAfter(ctx context.Context, manager *sandbox.Manager, closing chan<- struct{}) error {
	<-ctx.Done()
	close(closing)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return manager.Close(stop)
}

// sandboxes reads the durable state and returns the manager of the sandboxes and the guard that refuses superseded leaders.
func (c *Config) sandboxes(process string, dir *state.Dir, runtime *ctrd.Runtime, store *logs.Store, slots *slot.Pool, hub *status.Hub,
	ending func(context.Context, sandbox.Started)) (*sandbox.Manager, func(context.Context, string) error, error) {
	tombstones, err := dir.Sub("tombstones")
	if err != nil {
		return nil, nil, err
	}
	manager, err := sandbox.New(sandbox.Config{
		Runtime: runtime, Logs: store, Info: c.info(runtime), Process: process, State: dir, Tombstones: tombstones, CreateTimeout: c.CreateTimeout, MaxLimits: c.MaxLimits,
		Slots: slots, Claimer: runtime, Status: hub, Ending: ending,
	})
	if err != nil {
		return nil, nil, err
	}
	fence, err := terms.Open(dir, manager.Supersede)
	if err != nil {
		return nil, nil, err
	}
	return manager, fence.Guard, nil
}

// allow returns which roles may call what: the control plane manages sandboxes, and the gateway acts in them for users.
func allow() map[string][]rpc.Role {
	return map[string][]rpc.Role{
		agentv1.AgentService_ServiceDesc.ServiceName:           {rpc.RoleAllocator, rpc.RoleController},
		processv1.ProcessService_ServiceDesc.ServiceName:       {rpc.RoleGateway},
		filesystemv1.FilesystemService_ServiceDesc.ServiceName: {rpc.RoleGateway},
		tunnelv1.TunnelService_ServiceDesc.ServiceName:         {rpc.RoleGateway},
		usagev1.UsageService_ServiceDesc.ServiceName:           {rpc.RoleGateway},
	}
}

// users lets users with tickets call; nil if there are no certificates that could be verified.
func (c *Config) users() (*rpc.Users, error) {
	if c.TLS.Insecure {
		return nil, nil //nolint:nilnil // no users are a setting of the server
	}
	own, err := c.TLS.Identity()
	if err != nil {
		return nil, err
	}
	return agentrpc.Users(own, c.PodUID, clock.RealClock{}), nil
}

func (c *Config) info(runtime *ctrd.Runtime) *agentv1.AgentInfo {
	return &agentv1.AgentInfo{
		UserNamespaces: runtime.Users(), UserNamespacesOffReason: runtime.UsersOff(),
		PodName: c.PodName, PodUid: c.PodUID, Namespace: c.PodNamespace, Pool: c.Pool, NodeName: c.NodeName, PodIp: c.PodIP,
		Capacity:       int32(min(c.Capacity, math.MaxInt32)),
		RuntimeHandler: c.RuntimeHandler, Version: daemon.Version(), ReservedPorts: c.reservedPorts(),
	}
}
