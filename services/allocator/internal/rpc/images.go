package rpc

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/image"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Phases that PullImage itself sends.
const (
	phaseDone   = "done"
	phaseFailed = "failed"
)

// ListImages implements allocatorv1.AllocatorServiceServer.
func (a *Allocator) ListImages(_ context.Context, req *allocatorv1.ListImagesRequest) (*allocatorv1.ListImagesResponse, error) {
	name, err := a.config.Pools.Resolve(req.GetNamespace(), req.GetPool())
	if err != nil {
		return nil, err
	}
	pool, err := a.pool(req.GetNamespace(), name)
	if err != nil {
		return nil, err
	}
	agents := a.config.Fleet.Agents(pool.Namespace, pool.Name)
	slices.SortFunc(agents, func(x, y *allocatorv1.Agent) int {
		return cmp.Or(cmp.Compare(x.GetInfo().GetNodeName(), y.GetInfo().GetNodeName()), cmp.Compare(x.GetInfo().GetPodName(), y.GetInfo().GetPodName()))
	})
	images := map[string]*allocatorv1.PoolImage{}
	for _, ref := range pool.Spec.Images {
		key := normalized(ref)
		images[key] = &allocatorv1.PoolImage{Image: key, Pinned: true}
	}
	present := make([][]string, len(agents))
	for i, agent := range agents {
		present[i] = a.config.Fleet.Images(agent.GetInfo().GetPodUid())
		for _, key := range present[i] {
			if images[key] == nil {
				images[key] = &allocatorv1.PoolImage{Image: key}
			}
		}
	}
	resp := &allocatorv1.ListImagesResponse{}
	for _, key := range slices.Sorted(maps.Keys(images)) {
		for i, agent := range agents {
			images[key].Nodes = append(images[key].Nodes, nodeImage(agent, key, present[i]))
		}
		resp.Images = append(resp.Images, images[key])
	}
	return resp, nil
}

// nodeImage returns the state of an image on an agent's node, given the sorted images that are there.
func nodeImage(agent *allocatorv1.Agent, key string, present []string) *allocatorv1.NodeImage {
	_, found := slices.BinarySearch(present, key)
	node := &allocatorv1.NodeImage{NodeName: agent.GetInfo().GetNodeName(), AgentPod: agent.GetInfo().GetPodName(), Present: found}
	for _, pinned := range agent.GetPinnedImages() {
		if normalized(pinned.GetImage()) == key {
			node.State, node.Message = pinned.GetState(), pinned.GetMessage()
		}
	}
	return node
}

// normalized returns the normal form of a reference, or the reference itself if it is invalid: its agents say why they cannot
// pull it.
func normalized(ref string) string {
	if key, err := image.Normalize(ref); err == nil {
		return key
	}
	return ref
}

// PullImage implements allocatorv1.AllocatorServiceServer. The agents pull side by side.
func (a *Allocator) PullImage(req *allocatorv1.PullImageRequest, stream grpc.ServerStreamingServer[allocatorv1.PullImageResponse]) error {
	if _, err := image.Normalize(req.GetImage()); err != nil {
		return fault.Field("image", "%v", err)
	}
	name, err := a.config.Pools.Resolve(req.GetNamespace(), req.GetPool())
	if err != nil {
		return err
	}
	pool, err := a.pool(req.GetNamespace(), name)
	if err != nil {
		return err
	}
	agents := slices.DeleteFunc(a.config.Fleet.Agents(pool.Namespace, pool.Name), func(agent *allocatorv1.Agent) bool { return !agent.GetReady() })
	if len(agents) == 0 {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "pool %s/%s has no ready agents", pool.Namespace, pool.Name)
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	progress := make(chan *allocatorv1.PullImageResponse)
	var pulls sync.WaitGroup
	for _, agent := range agents {
		pulls.Go(func() { a.pull(ctx, agent.GetInfo(), req.GetImage(), progress) })
	}
	go func() { pulls.Wait(); close(progress) }()
	var sending error
	for m := range progress { // until every pull has ended: none outlives the call
		if sending == nil {
			if sending = stream.Send(m); sending != nil {
				cancel()
			}
		}
	}
	return errors.Join(sending, stream.Context().Err())
}

// pull pulls an image on one agent and reports the progress, with the phase `done` or `failed` last.
func (a *Allocator) pull(ctx context.Context, agent *agentv1.AgentInfo, ref string, progress chan<- *allocatorv1.PullImageResponse) {
	last := &agentv1.PullProgress{}
	send := func(p *agentv1.PullProgress, message string) {
		last = p
		progress <- &allocatorv1.PullImageResponse{NodeName: agent.GetNodeName(), AgentPod: agent.GetPodName(), Progress: p, Error: message}
	}
	err := a.follow(ctx, agent.GetPodUid(), ref, func(p *agentv1.PullProgress) { send(p, "") })
	switch {
	case err != nil:
		send(&agentv1.PullProgress{
			DownloadedBytes: last.GetDownloadedBytes(), TotalBytes: last.GetTotalBytes(), Elapsed: last.GetElapsed(), Phase: phaseFailed,
		}, err.Error())
	case last.GetPhase() != phaseDone:
		send(&agentv1.PullProgress{Phase: phaseFailed}, "the agent ended the pull without a result")
	}
}

// follow returns nil when the agent has ended the stream.
func (a *Allocator) follow(ctx context.Context, agentUID, ref string, send func(*agentv1.PullProgress)) error {
	client, ok := a.config.Agents.Client(agentUID)
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "no connection to the agent")
	}
	pull, err := client.PullImage(ctx, &agentv1.PullImageRequest{Image: ref})
	if err != nil {
		return rpc.FromStatus(err)
	}
	for {
		m, err := pull.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return rpc.FromStatus(err)
		}
		send(m.GetProgress())
	}
}
