// Package rogue makes the attempts of a hostile agent: one that lies to the allocator, in a Pod of a real pool and with the certificate that
// the controller has issued to it, and one who uses that certificate for what it is not meant. Nothing of it may be called concurrently.
package rogue

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/image"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

const (
	// pool is that of the hostile agent, in the namespace of the hostile tenant.
	pool = "rogue"
	// agentImage is the image of the hostile agent.
	agentImage = inside.Repository + "-agent:dev"
	// unknownImage is one that the agent only says to have.
	unknownImage = "docker.io/library/escape-nowhere:dev"
	// followTime is how long the mesh has to follow lies: two reports of an agent and a round of recovery.
	followTime = 8 * time.Second
)

// Image is the image of the hostile agent.
func Image(program []byte) image.Image {
	return image.Image{Ref: agentImage, Entrypoint: []string{"/agent"}, Layers: [][]image.Entry{{image.Dir("tmp", 0o1777), image.Executable("agent", program)}}}
}

// Run starts the hostile agent and makes all attempts.
func Run(ctx context.Context, s *mesh.Scene) error {
	s.Say("hostile agent: lies")
	if err := Image(s.Agent).Import(ctx, s.Node); err != nil {
		return err
	}
	if _, err := image.Unpack(ctx, s.Node, agentImage); err != nil { // by the kubelet, otherwise
		return err
	}
	lies := &Lies{
		Namespace: s.Victim.Namespace, Pool: s.Victim.Pool, Name: s.Target.Name, UID: s.Target.UID, Attempt: s.Target.Attempt,
		AgentPod: s.Target.AgentPod, AgentUID: s.Target.AgentUID, AgentAddress: s.Target.AgentIP + ":" + s.AgentPort(), Image: unknownImage,
	}
	before, err := poolOf(ctx, s)
	if err != nil {
		return err
	}
	o := mesh.PoolOptions{Image: agentImage, Env: map[string]string{LiesEnv: lies.String()}, Agents: 1, Capacity: 5}
	if err := s.MakePool(ctx, s.Hostile.Namespace, pool, o); err != nil {
		return err
	}
	defer retire(context.WithoutCancel(ctx), s)
	pod, err := awaitRefusal(ctx, s)
	if err != nil {
		return fmt.Errorf("waiting until something of the hostile agent is refused: %w", err)
	}
	if err := mesh.Wait(ctx, followTime); err != nil {
		return err
	}
	tell(ctx, s, pod, before)
	answerLies(ctx, s)
	s.Say("hostile agent: its certificate")
	if err := withCertificate(ctx, s, pod); err != nil {
		return err
	}
	return pretend(ctx, s)
}

// retire ends the hostile agent, which would not end as others do: nothing that it says is true.
func retire(ctx context.Context, s *mesh.Scene) {
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: s.Hostile.Namespace, Name: pool}}
	_ = s.Kube.Delete(ctx, p)
	_ = s.Kube.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(s.Hostile.Namespace), client.MatchingLabels{v1alpha1.LabelPool: pool}, client.GracePeriodSeconds(0))
}

// awaitRefusal waits until an Event says that something of the agent was refused: only then it has lied, and the attempts mean something.
func awaitRefusal(ctx context.Context, s *mesh.Scene) (*corev1.Pod, error) {
	var found *corev1.Pod
	err := mesh.Poll(ctx, mesh.ReadyTime, func(ctx context.Context) error {
		pods, err := s.Agents(ctx, s.Hostile.Namespace, pool)
		if err != nil {
			return err
		}
		if len(pods) == 0 {
			return fmt.Errorf("there is no agent: %s", pending(ctx, s))
		}
		var events corev1.EventList
		if err := s.Kube.List(ctx, &events, client.InNamespace(s.Hostile.Namespace)); err != nil {
			return err
		}
		for _, e := range events.Items {
			for i := range pods {
				if e.Reason == "Refused" && e.InvolvedObject.UID == pods[i].UID {
					found = &pods[i]
					return nil
				}
			}
		}
		return fmt.Errorf("no Event says that anything of agent %s was refused", pods[0].Name)
	})
	return found, err
}

// pending says what the Pods and the last Events of the pool are, for an agent that does not start.
func pending(ctx context.Context, s *mesh.Scene) string {
	var pods corev1.PodList
	var events corev1.EventList
	err := errors.Join(s.Kube.List(ctx, &pods, client.InNamespace(s.Hostile.Namespace), client.MatchingLabels{v1alpha1.LabelPool: pool}),
		s.Kube.List(ctx, &events, client.InNamespace(s.Hostile.Namespace)))
	out := []string{fmt.Sprintf("%d Pods, %v", len(pods.Items), err)}
	for _, p := range pods.Items {
		out = append(out, fmt.Sprintf("Pod %s is %s, address %q", p.Name, p.Status.Phase, p.Status.PodIP))
	}
	for _, e := range events.Items {
		if e.Type == corev1.EventTypeWarning {
			out = append(out, fmt.Sprintf("%s %s: %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message))
		}
	}
	return strings.Join(out, "; ")
}

func poolOf(ctx context.Context, s *mesh.Scene) (*allocatorv1.Pool, error) {
	resp, err := s.Victim.Allocator.GetPool(ctx, &allocatorv1.GetPoolRequest{Namespace: s.Victim.Namespace, Name: s.Victim.Pool})
	if err != nil {
		return nil, fmt.Errorf("reading the pool: %w", err)
	}
	return resp.GetPool(), nil
}

// tell looks at what the lies in the status of the agent have done.
func tell(ctx context.Context, s *mesh.Scene, pod *corev1.Pod, before *allocatorv1.Pool) {
	made := func(name, does, success, evidence string, refused error) {
		s.Log.Made(suite.Attempt{Name: "agent, lies: " + name, Does: "says " + does, Success: success}, "", evidence, refused)
	}
	ignored := errors.New("it is ignored")
	evidence, err := impersonates(ctx, s, pod)
	made("identity", "that it is the agent of another tenant", "the other tenant has it as an agent", evidence, orBroken(err, ignored))
	evidence = ""
	after, err := poolOf(ctx, s)
	if err == nil && (after.GetCapacity() != before.GetCapacity() || after.GetAgents() != before.GetAgents()) {
		evidence = fmt.Sprintf("the pool has capacity %d on %d agents, it had %d on %d", after.GetCapacity(), after.GetAgents(), before.GetCapacity(), before.GetAgents())
	}
	made("capacity", "that it has capacity for a million sandboxes of another tenant", "the pool of the other tenant has another capacity", evidence, orBroken(err, ignored))
	made("reports, tombstones and superseded attempts", "that the sandbox of another tenant has ended, was deleted, runs elsewhere, or was superseded by one of its own",
		"that sandbox has changed", s.Harmed(ctx, s.Target), ignored)
	evidence, err = exists(ctx, s, PlantedForeign)
	made("a sandbox of another tenant", "that it runs a sandbox in the namespace of another tenant, whose resource must be written", "there is such a sandbox", evidence, orBroken(err, ignored))
	evidence = ""
	images, err := s.Victim.Allocator.ListImages(ctx, &allocatorv1.ListImagesRequest{Namespace: s.Victim.Namespace, Pool: s.Victim.Pool})
	for _, i := range images.GetImages() {
		if i.GetImage() == unknownImage {
			evidence = fmt.Sprintf("the pool of the other tenant has %s", i)
		}
	}
	made("images", "that another tenant's node has an image", "the pool of the other tenant has it", evidence, orBroken(err, ignored))
}

// orBroken returns why an attempt could not be judged, if so, and else why it was refused.
func orBroken(err, refused error) error {
	if err != nil {
		return suite.Brokenf("looking at the result: %w", err)
	}
	return refused
}

// impersonates returns evidence if the other tenant's agents have the address of the hostile one, or it is one of them.
func impersonates(ctx context.Context, s *mesh.Scene, pod *corev1.Pod) (string, error) {
	list, err := s.Victim.Allocator.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: s.Victim.Namespace})
	if err != nil {
		return "", err
	}
	for _, a := range list.GetAgents() {
		if a.GetInfo().GetPodUid() == string(pod.UID) || a.GetAddress() == pod.Status.PodIP+":"+s.AgentPort() {
			return fmt.Sprintf("agent %s", a), nil
		}
	}
	if len(list.GetAgents()) == 0 {
		return "", errors.New("the other tenant has no agents")
	}
	own, err := s.Hostile.Allocator.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: s.Hostile.Namespace, Pool: pool})
	if err != nil {
		return "", err
	}
	for _, a := range own.GetAgents() {
		if i := a.GetInfo(); i.GetNamespace() != s.Hostile.Namespace || i.GetPool() != pool || i.GetPodUid() != string(pod.UID) || i.GetNodeName() != pod.Spec.NodeName {
			return fmt.Sprintf("the agent is listed as %s", i), nil
		}
	}
	return "", nil
}

// exists returns evidence if the other tenant has a sandbox of a name.
func exists(ctx context.Context, s *mesh.Scene, name string) (string, error) {
	if box, err := s.Victim.Get(ctx, name); err == nil {
		return fmt.Sprintf("there is %s", box), nil
	}
	err := s.Kube.Get(ctx, client.ObjectKey{Namespace: s.Victim.Namespace, Name: name}, &v1alpha1.Sandbox{})
	if err == nil {
		return "there is a resource " + name, nil
	}
	return "", client.IgnoreNotFound(err)
}

// answerLies creates a sandbox on the hostile agent, whose answer is about another one.
func answerLies(ctx context.Context, s *mesh.Scene) {
	const name = "asked"
	creating, cancel := context.WithTimeout(ctx, followTime)
	defer cancel()
	resp, err := s.Hostile.Create(creating, name, &sandboxv1.SandboxSpec{Image: inside.RootImage, Pool: pool, Args: []string{"end"}})
	refused := errors.New("only its own sandbox is affected")
	if err != nil {
		refused = err
	}
	evidence := ""
	if box := resp.GetSandbox(); err == nil && (box.GetNamespace() != s.Hostile.Namespace || box.GetName() != name) {
		evidence = fmt.Sprintf("the caller was answered with %s", box)
	}
	if evidence == "" {
		var lookErr error
		if lookErr = mesh.Wait(ctx, time.Second); lookErr == nil {
			evidence, lookErr = exists(ctx, s, PlantedAnswer)
		}
		refused = orBroken(lookErr, refused)
	}
	if evidence == "" {
		evidence = s.Harmed(ctx, s.Target)
	}
	s.Log.Made(suite.Attempt{Name: "agent, lies: answer to a create", Does: "answers a create with the report of a sandbox of another tenant",
		Success: "there is such a sandbox, the caller has it as the answer, or a sandbox of the other tenant has changed"}, "", evidence, refused)
	_ = s.Hostile.Delete(ctx, name)
}

// pretend makes a Pod with the labels of an agent that no pool owns.
func pretend(ctx context.Context, s *mesh.Scene) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Hostile.Namespace, Name: "pretender", Labels: map[string]string{
			v1alpha1.LabelPool: s.Hostile.Pool, v1alpha1.LabelComponent: v1alpha1.ComponentAgent,
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: agentImage, ImagePullPolicy: corev1.PullNever, Args: []string{"wait"}}}},
	}
	if err := s.Kube.Create(ctx, pod); err != nil {
		return fmt.Errorf("making a Pod: %w", err)
	}
	err := mesh.Poll(ctx, mesh.ReadyTime, func(ctx context.Context) error {
		if err := s.Kube.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil || pod.Status.PodIP == "" {
			return errors.Join(errors.New("the Pod has no address"), err)
		}
		return nil
	})
	if err == nil {
		err = mesh.Wait(ctx, 2*time.Second)
	}
	evidence, refused := "", errors.New("it is no agent")
	list, listErr := s.Hostile.Allocator.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: s.Hostile.Namespace})
	for _, a := range list.GetAgents() {
		if a.GetInfo().GetPodName() == pod.Name {
			evidence = fmt.Sprintf("it is %s", a)
		}
	}
	s.Log.Made(suite.Attempt{Name: "agent: a Pod with the labels of one", Does: "makes a Pod that looks like an agent and that no pool owns", Success: "it is listed as an agent"},
		"", evidence, orBroken(errors.Join(err, listErr), refused))
	if err := s.Kube.Delete(ctx, pod, client.GracePeriodSeconds(0)); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting a Pod: %w", err)
	}
	return nil
}
