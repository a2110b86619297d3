package truth

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

const agentPort = 5758

func listOptions(resourceVersion string) *metav1.ListOptions {
	return &metav1.ListOptions{ResourceVersion: resourceVersion}
}

// agents reads the state that each agent of the pool reports.
func (o *Observer) agents(ctx context.Context, obs *audit.Observations) error {
	pods, err := o.Agents(ctx)
	if err != nil {
		return err
	}
	obs.Agents = map[string]bool{}
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	for i := range pods {
		pod := &pods[i]
		obs.Agents[string(pod.UID)] = true
		group.Go(func() error {
			snapshot, err := o.snapshot(ctx, pod)
			if err != nil {
				return fmt.Errorf("asking agent %s: %w", pod.Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, s := range snapshot.GetSandboxes() {
				obs.Reports = append(obs.Reports, report(string(pod.UID), s))
			}
			for _, t := range snapshot.GetTombstones() {
				obs.Tombstones = append(obs.Tombstones, audit.Tombstone{AgentUID: string(pod.UID), Name: t.GetName(), UID: t.GetFence().GetSandboxUid()})
			}
			return nil
		})
	}
	return group.Wait()
}

// counts reads what the allocator and the controller count.
func (o *Observer) counts(ctx context.Context, obs *audit.Observations) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	list, err := o.Allocator.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: o.Namespace, Pool: o.Pool})
	if err != nil {
		return fmt.Errorf("listing the allocator's agents: %w", err)
	}
	obs.Reserved = map[string]int{}
	for _, a := range list.GetAgents() {
		obs.Reserved[a.GetInfo().GetPodUid()] = int(a.GetAllocated())
	}
	var p v1alpha1.SandboxPool
	if err := o.Kube.Get(ctx, client.ObjectKey{Namespace: o.Namespace, Name: o.Pool}, &p); err != nil {
		return fmt.Errorf("reading the pool: %w", err)
	}
	obs.Assigned = int(p.Status.ActiveSandboxes)
	return nil
}

func report(agent string, s *agentv1.SandboxReport) audit.Report {
	return audit.Report{
		AgentUID: agent, Name: s.GetRecord().GetName(), UID: s.GetRecord().GetFence().GetSandboxUid(),
		RequestID: s.GetRecord().GetRequestId(), Attempt: s.GetRecord().GetFence().GetAttempt(),
		State: strings.TrimPrefix(s.GetState().String(), "SANDBOX_STATE_"), Persisted: s.GetPersisted(),
		Dump: protojson.Format(s),
	}
}

// snapshot reads the first message of an agent's status.
func (o *Observer) snapshot(ctx context.Context, pod *corev1.Pod) (*agentv1.AgentSnapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := rpc.Dial(net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(agentPort)), rpc.ClientConfig{TLS: o.tls, AgentUID: string(pod.UID)})
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	stream, err := agentv1.NewAgentServiceClient(conn).WatchStatus(ctx, &agentv1.WatchStatusRequest{})
	if err != nil {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return first.GetSnapshot(), nil
}
